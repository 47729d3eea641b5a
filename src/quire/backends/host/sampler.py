"""Logits to tokens: a pure function of each row's logits, parameters, known tokens, seed, position and mask.

Everything after the raw logits is computed in float64, in this order:

    penalties    repetition over all known tokens, presence and frequency over generated tokens
    bias         logit_bias is added; tokens that are not allowed, masked, banned, or stop too early are excluded
    greedy       temperature 0 or top-k 1: the most likely token, the smallest id if several are equal
    temperature  logits / temperature
    min-p        tokens less likely than min_p times the most likely one are excluded
    top-k        tokens less likely than the k-th most likely are excluded; tokens equal to it stay
    top-p        a token is excluded if the strictly more likely tokens (of those that remain) already reach top_p
    draw         the first remaining token id at which the cumulative probability exceeds the uniform number

With a mask of few tokens only these are processed; the zero weights of others would not change a sum. The result
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
from quire.backends.kernels.arrays import Doubles, Ids
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
    """The most likely token (argmax) of each row of logits."""

    tokens: Ids
    """Most likely token of each row, the smallest id among equals."""
    is_finite: NDArray[np.bool_]
    """Whether all numbers of the row are finite."""


def choose(
    logits: Logits,
    samplings: Sequence[Sampling],
    cached: Sequence[RowLists] | None = None,
    masks: Sequence[bytes | None] | None = None,
    likeliest: Likeliest | None = None,
) -> list[Choice]:
    """Choose one token for each row of `logits` ([row, vocabulary]), by the row's sampling parameters and mask.

    `cached` lists and `likeliest` tokens only save work; they do not change the result.
    """
    if cached is None:
        cached = [RowLists(TokenLists(row.params, logits.shape[1])) for row in samplings]
    if masks is None:
        masks = [None] * len(samplings)
    rows = [_Row(sampling, lists, mask) for sampling, lists, mask in zip(samplings, cached, masks, strict=True)]
    argmax = _likeliest(logits) if likeliest is None else likeliest
    are_finite = argmax.is_finite.tolist()
    tokens: list[int] = argmax.tokens.tolist()
    choices = [Choice(token_id) for token_id in tokens]
    open_rows = []
    for index, row in enumerate(rows):
        if not are_finite[index]:
            choices[index] = Choice(None, RowError(ROW_FAILED, "the model's logits are not finite"))
        elif not row.is_greedy or row.is_shifted or not row.allows(tokens[index]):
            open_rows.append(index)
    for part in _slices(open_rows, logits.shape[1]):
        for index, choice in zip(part, _choose_among([logits[i] for i in part], [rows[i] for i in part]), strict=True):
            choices[index] = choice
    return choices


def _likeliest(logits: Logits) -> Likeliest:
    if logits.dtype == np.float32 and logits.flags.c_contiguous and extension.availability().is_available:
        return Likeliest(*sampling.argmax(logits))
    # Row by row, because a second copy of all logits would exceed all other memory of sampling.
    is_finite = [bool(np.isfinite(row).all()) for row in logits]
    return Likeliest(logits.argmax(axis=1), np.array(is_finite, np.bool_))


def logprobs_of(logits: Logits, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """Return log-probability, rank and `num_alternatives` most likely tokens for one token per row of raw logits."""
    peaks, totals = _exp_totals(logits)
    norms = [math.log(total) for total in totals]
    likeliest = _likeliest_tokens(logits, max(num_alternatives, default=0))
    reports = []
    for i, token_id in enumerate(token_ids):
        row, peak, norm = logits[i], peaks[i], norms[i]
        alternatives = tuple((other, (value - peak) - norm) for other, value in likeliest[i][: num_alternatives[i]])
        rank = int(np.count_nonzero(row > row[token_id])) + 1
        reports.append(TokenLogprobs(token_id, (float(row[token_id]) - peak) - norm, rank, alternatives))
    return reports


def _exp_totals(logits: Logits) -> tuple[list[float], list[float]]:
    """Return each row's maximum and its sum of e^(logit - maximum), in token order.

    Without the subtraction, the exponentials of large logits would overflow.
    """
    if logits.dtype == np.float32 and logits.flags.c_contiguous and extension.availability().is_available:
        row_peaks, row_totals = sampling.exp_totals(logits)
        return row_peaks.tolist(), row_totals.tolist()
    peaks = logits.max(axis=1).astype(np.float64)
    shifted = logits.astype(np.float64) - peaks[:, None]
    return peaks.tolist(), [float(np.cumsum(exp_of(row))[-1]) for row in shifted]


def _likeliest_tokens(values: Logits, count: int) -> list[list[tuple[int, float]]]:
    """Return each row's `count` most likely tokens (or all, if fewer) with logits; of equals, the smaller id first.

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
    bounds = np.partition(peaks, width - count, axis=1)[:, width - count]
    row, column = np.nonzero(peaks >= bounds[:, None])
    rows = np.concatenate((np.repeat(row, depth), np.repeat(np.arange(num_rows), rest.shape[1])))
    ids = np.concatenate(
        ((column[:, None] + np.arange(depth) * width).ravel(), np.tile(np.arange(depth * width, size), num_rows))
    )
    candidates = np.concatenate((columns[row, :, column].ravel(), rest.ravel()))
    reaches_bound = candidates >= bounds[rows]
    rows, ids, candidates = rows[reaches_bound], ids[reaches_bound], candidates[reaches_bound]
    order = np.lexsort((ids, -candidates, rows))
    pairs = list(zip(ids[order].tolist(), candidates[order].tolist(), strict=True))
    firsts = np.searchsorted(rows[order], np.arange(num_rows)).tolist()
    ends = np.searchsorted(rows[order], np.arange(num_rows), side="right").tolist()
    return [pairs[first : min(first + count, end)] for first, end in zip(firsts, ends, strict=True)]


class _Row(NamedTuple):
    """The sampling input of one row: parameters, cached lists and mask."""

    sampling: Sampling
    cached: RowLists
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
    def excluded(self) -> Mask | None:
        """Tokens that the row's own lists exclude, regardless of the mask."""
        return self.cached.lists.excluded(is_early=self.is_early)

    def allows(self, token_id: int) -> bool:
        if self.mask is not None and not self.mask[token_id >> 3] >> (token_id & 7) & 1:
            return False
        return (excluded := self.excluded) is None or not excluded[token_id]

    @property
    def known_tokens(self) -> tuple[int, ...]:
        if self.sampling.known_tokens is None:
            raise InvariantError("expected known tokens in the plan, because penalties need them; got none")
        return self.sampling.known_tokens


class _Candidates(NamedTuple):
    """The tokens of a row from which one is chosen, and their logits."""

    numbers: NDArray[Any]
    token_ids: Ids | None
    """Token id of each number; None if all tokens are present."""

    def choice(self, index: int) -> Choice:
        """Return the token at this index; an index past the end means that no token could be chosen."""
        if index < len(self.numbers) and self.numbers[index] > NEG_INF:
            return Choice(index if self.token_ids is None else int(self.token_ids[index]))
        return Choice(None, INFINITE_NUMBERS if (self.numbers > NEG_INF).any() else NO_TOKEN_LEFT)


def _choose_among(logits: Sequence[Logits], rows: Sequence[_Row]) -> list[Choice]:
    """Choose a token for each row among its candidates. The logits are not modified."""
    candidates = [_candidates_of(numbers, row) for numbers, row in zip(logits, rows, strict=True)]
    randoms = [index for index, row in enumerate(rows) if not row.is_greedy]
    draws = draw([candidates[index].numbers for index in randoms], [rows[index].sampling for index in randoms])
    draw_of = dict(zip(randoms, draws, strict=True))
    return [
        row.choice(draw_of[index] if index in draw_of else int(row.numbers.argmax()) if len(row.numbers) else 0)
        for index, row in enumerate(candidates)
    ]


def _candidates_of(numbers: NDArray[Any], row: _Row) -> _Candidates:
    """Return a row's candidates; with a mask of few tokens only these: others would add zeros to every sum."""
    params = row.sampling.params
    if numbers.dtype not in (np.float32, np.float64):
        numbers = numbers.astype(np.float32)
    if row.is_shifted:
        numbers = numbers.astype(np.float64)
        _add_penalties(numbers, row)
        if params.logit_bias:
            np.add.at(numbers, *row.cached.lists.biases)
    if row.mask is not None:
        allowed = row.cached.lists.allowed(row.mask, is_early=row.is_early)
        if not allowed.is_nearly_all:
            return _Candidates(numbers[allowed.ids], allowed.ids)
        numbers = numbers if row.is_shifted else numbers.copy()
        numbers[allowed.excluded_ids] = NEG_INF
    elif (excluded := row.excluded) is not None:
        numbers = np.where(excluded, NEG_INF, numbers)
    return _Candidates(np.ascontiguousarray(numbers), None)


def _add_penalties(values: Doubles, row: _Row) -> None:
    """Apply the repetition penalty to known tokens, and presence and frequency penalties by count in the output."""
    params = row.sampling.params
    if params.repetition_penalty != 1.0:
        ids, _ = row.cached.known_counts.counts_of(row.known_tokens)
        old, penalty = values[ids], params.repetition_penalty
        values[ids] = np.where(old > 0, old / penalty, old * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = row.cached.output_counts.counts_of(row.known_tokens[row.sampling.num_prompt_tokens :])
        values[ids] = values[ids] - params.presence_penalty - params.frequency_penalty * counts


def _slices(rows: Sequence[int], vocabulary_size: int) -> list[Sequence[int]]:
    count = max(1, MAX_SLICE_VALUES // vocabulary_size)
    return [rows[first : first + count] for first in range(0, len(rows), count)]
