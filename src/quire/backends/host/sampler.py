"""Logits to tokens: a pure function of each row's logits, parameters, known tokens, seed, position and mask.

Everything after the raw logits is computed in float64, in this order:

    penalties    repetition over all known tokens, presence and frequency over generated tokens
    bias         logit_bias is added; tokens not allowed, masked, banned, or stopping too early are excluded
    greedy       temperature 0 or top-k 1: the most likely token, the smallest id if several are equal
    temperature  logits / temperature
    min-p        tokens less likely than min_p times the most likely one are excluded
    top-k        tokens less likely than the k-th most likely are excluded; tokens equal to it stay
    top-p        a token is excluded if the strictly more likely tokens (of those left) already reach top_p
    draw         the first remaining token id at which the cumulative probability exceeds the uniform number

With a mask only the allowed tokens are processed; the zero weights of all others would not change a sum. The result
never depends on how a library sorts equal numbers. Log-probabilities and ranks are those of the raw logits. A row with
non-finite logits fails alone. `drawing` implements the steps from temperature on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.backends.host.drawing import NEG_INF, draw
from quire.backends.host.exponential import exp_of
from quire.backends.host.token_lists import Mask, RowLists, TokenLists
from quire.backends.kernels import extension, sampling
from quire.backends.kernels.arrays import Ids, Numbers
from quire.core.step import INFINITE_NUMBERS, NO_TOKEN_LEFT, ROW_FAILED, RowError, Sampling, TokenLogprobs
from quire.errors import InvariantError

MAX_SLICE_VALUES = 1 << 21
"""Maximum numbers processed at once: bounds the memory of sampling for any vocabulary size."""
COLUMN_DEPTH = 64
"""Tokens per column in the search for the most likely ones: few columns to sort, few tokens to check in each."""

Logits = NDArray[Any]
"""[row, vocabulary], in any floating-point dtype of numpy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for one row, or the error that prevented a choice."""

    token_id: int | None
    error: RowError | None = None


class Likeliest(NamedTuple):
    """The argmax of each row of logits."""

    tokens: Ids
    """Most likely token of each row, the smallest id among equals."""
    is_finite: NDArray[np.bool_]
    """Whether all numbers of the row are finite."""


def choose(
    logits: Logits,
    samplings: Sequence[Sampling],
    kept: Sequence[RowLists] | None = None,
    masks: Sequence[bytes | None] | None = None,
    likeliest: Likeliest | None = None,
) -> list[Choice]:
    """Choose one token for each row of `logits` ([row, vocabulary]), by the row's sampling parameters and mask.

    `kept` lists and `likeliest` tokens only save work; they do not change the result.
    """
    if kept is None:
        kept = [RowLists(TokenLists(one.params, logits.shape[1])) for one in samplings]
    if masks is None:
        masks = [None] * len(samplings)
    rows = [_Row(sampling, lists, mask) for sampling, lists, mask in zip(samplings, kept, masks, strict=True)]
    found = _likeliest(logits) if likeliest is None else likeliest
    is_finite = found.is_finite.tolist()
    tokens: list[int] = found.tokens.tolist()
    choices = [Choice(token_id) for token_id in tokens]
    others = []
    for at, row in enumerate(rows):
        if not is_finite[at]:
            choices[at] = Choice(None, RowError(ROW_FAILED, "the model's logits are not finite"))
        elif not row.is_greedy or row.is_shifted or not row.allows(tokens[at]):
            others.append(at)
    for part in _slices(others, logits.shape[1]):
        for at, choice in zip(part, _choose_left([logits[at] for at in part], [rows[at] for at in part]), strict=True):
            choices[at] = choice
    return choices


def _likeliest(logits: Logits) -> Likeliest:
    if logits.dtype == np.float32 and logits.flags.c_contiguous and extension.available().is_available:
        return Likeliest(*sampling.argmax(logits))
    # Row by row, because a second copy of all logits would exceed all other memory of sampling.
    is_finite = [bool(np.isfinite(row).all()) for row in logits]
    return Likeliest(logits.argmax(axis=1), np.array(is_finite, np.bool_))


def logprobs_of(logits: Logits, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """Return log-probability and rank of one token per row of raw logits, with that many most likely alternatives."""
    peaks, totals = _exp_totals(logits)
    norms = [math.log(total) for total in totals]
    likeliest = _likeliest_tokens(logits, max(num_alternatives, default=0))
    reports = []
    for at, token_id in enumerate(token_ids):
        row, peak, norm = logits[at], peaks[at], norms[at]
        alternatives = tuple((other, (value - peak) - norm) for other, value in likeliest[at][: num_alternatives[at]])
        rank = int(np.count_nonzero(row > row[token_id])) + 1
        reports.append(TokenLogprobs(token_id, (float(row[token_id]) - peak) - norm, rank, alternatives))
    return reports


def _exp_totals(logits: Logits) -> tuple[list[float], list[float]]:
    """Return each row's maximum and its sum of e^(logit - maximum), in token order.

    Without the subtraction, the sum of exponentials of large logits would lose their differences.
    """
    if logits.dtype == np.float32 and logits.flags.c_contiguous and extension.available().is_available:
        found = sampling.exp_totals(logits)
        return found[0].tolist(), found[1].tolist()
    peaks = logits.max(axis=1).astype(np.float64)
    below = logits.astype(np.float64) - peaks[:, None]
    return peaks.tolist(), [float(np.cumsum(exp_of(row))[-1]) for row in below]


def _likeliest_tokens(values: Logits, count: int) -> list[list[tuple[int, float]]]:
    """Return each row's `count` most likely tokens (at most all) with logits, the smaller id first among equals.

    A row is divided into columns. The `count` largest column maxima give a lower bound: a token below the smallest of
    them cannot be among the most likely. Only columns that reach this bound are examined.
    """
    num_rows, size = values.shape
    count = min(count, size)
    if count == 0:
        return [[] for _ in values]
    depth = min(COLUMN_DEPTH, size // count)
    width = size // depth
    columns, rest = values[:, : depth * width].reshape(num_rows, depth, width), values[:, depth * width :]
    peaks = columns.max(axis=1)
    guesses = np.partition(peaks, width - count, axis=1)[:, width - count]
    row, column = np.nonzero(peaks >= guesses[:, None])
    rows = np.concatenate((np.repeat(row, depth), np.repeat(np.arange(num_rows), rest.shape[1])))
    ids = np.concatenate(
        ((column[:, None] + np.arange(depth) * width).ravel(), np.tile(np.arange(depth * width, size), num_rows))
    )
    found = np.concatenate((columns[row, :, column].ravel(), rest.ravel()))
    is_near = found >= guesses[rows]
    rows, ids, found = rows[is_near], ids[is_near], found[is_near]
    order = np.lexsort((ids, -found, rows))
    pairs = list(zip(ids[order].tolist(), found[order].tolist(), strict=True))
    firsts = np.searchsorted(rows[order], np.arange(num_rows)).tolist()
    ends = np.searchsorted(rows[order], np.arange(num_rows), side="right").tolist()
    return [pairs[first : min(first + count, end)] for first, end in zip(firsts, ends, strict=True)]


class _Row(NamedTuple):
    """The sampling input of one row: parameters, kept lists and mask."""

    sampling: Sampling
    kept: RowLists
    mask: bytes | None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.params.temperature == 0.0 or self.sampling.params.top_k == 1

    @property
    def is_shifted(self) -> bool:
        """Whether penalties or biases change the logits."""
        return self.sampling.params.needs_known_tokens or bool(self.sampling.params.logit_bias)

    @property
    def is_early(self) -> bool:
        """Whether stop tokens may not be chosen yet."""
        return self.sampling.num_output_tokens < self.sampling.params.min_tokens

    @property
    def struck(self) -> Mask | None:
        """Tokens that the row's own lists exclude, regardless of the mask."""
        return self.kept.lists.struck(is_early=self.is_early)

    def allows(self, token_id: int) -> bool:
        if self.mask is not None and not self.mask[token_id >> 3] >> (token_id & 7) & 1:
            return False
        return (struck := self.struck) is None or not struck[token_id]

    @property
    def known(self) -> tuple[int, ...]:
        if self.sampling.known_tokens is None:
            raise InvariantError("expected the known tokens for penalties, the plan has none")
        return self.sampling.known_tokens


class _Left(NamedTuple):
    """The logits of the tokens among which one is chosen."""

    numbers: NDArray[Any]
    token_ids: Ids | None
    """Token id of each number; None if all tokens are present."""

    def choice(self, place: int) -> Choice:
        """Return the token at the chosen index; an index past the end means that none could be chosen."""
        if place < len(self.numbers) and self.numbers[place] > NEG_INF:
            return Choice(place if self.token_ids is None else int(self.token_ids[place]))
        return Choice(None, INFINITE_NUMBERS if (self.numbers > NEG_INF).any() else NO_TOKEN_LEFT)


def _choose_left(logits: Sequence[Logits], rows: Sequence[_Row]) -> list[Choice]:
    """Choose a token for each row among its remaining tokens. The logits are not modified."""
    left = [_left_of(numbers, row) for numbers, row in zip(logits, rows, strict=True)]
    drawn = [at for at, row in enumerate(rows) if not row.is_greedy]
    found = draw([left[at].numbers for at in drawn], [rows[at].sampling for at in drawn])
    places = dict(zip(drawn, found, strict=True))
    return [
        one.choice(places[at] if at in places else int(one.numbers.argmax()) if len(one.numbers) else 0)
        for at, one in enumerate(left)
    ]


def _left_of(numbers: NDArray[Any], row: _Row) -> _Left:
    """Return the remaining tokens of a row; with a mask only these, because excluded ones add zeros to every sum."""
    params = row.sampling.params
    if numbers.dtype not in (np.float32, np.float64):
        numbers = numbers.astype(np.float32)
    if row.is_shifted:
        numbers = numbers.astype(np.float64)
        _penalise(numbers, row)
        if params.logit_bias:
            np.add.at(numbers, *row.kept.lists.biases)
    if row.mask is not None:
        token_ids = row.kept.lists.left(row.mask, is_early=row.is_early)
        return _Left(numbers[token_ids], token_ids)
    if (struck := row.struck) is not None:
        numbers = np.where(struck, NEG_INF, numbers)
    return _Left(np.ascontiguousarray(numbers), None)


def _penalise(values: Numbers, row: _Row) -> None:
    """Apply the repetition penalty to known tokens, and presence and frequency penalties by count in the output."""
    params = row.sampling.params
    if params.repetition_penalty != 1.0:
        ids, _ = row.kept.known.of(row.known)
        found = values[ids]
        values[ids] = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = row.kept.produced.of(row.known[row.sampling.num_prompt_tokens :])
        values[ids] = values[ids] - params.presence_penalty - params.frequency_penalty * counts


def _slices(rows: Sequence[int], vocabulary_size: int) -> list[Sequence[int]]:
    count = max(1, MAX_SLICE_VALUES // vocabulary_size)
    return [rows[first : first + count] for first in range(0, len(rows), count)]
