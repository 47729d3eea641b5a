"""Logits to tokens: a pure function of each row's logits, parameters, known tokens, seed, position and mask.

Everything after the raw logits happens in float64, in this order:

    penalties   repetition over all known tokens, presence and frequency over those produced
    bias        logit_bias is added; tokens not allowed, masked, banned, or stopping too early are struck out
    greedy      temperature 0 or top-k 1: the likeliest token, the smallest id among equals
    heat        logits / temperature
    min-p       tokens less likely than min_p times the likeliest are struck out
    top-k       tokens less likely than the k-th likeliest are struck out; equals of it stay
    top-p       tokens of which the strictly likelier ones (of those left) already hold top_p are struck out
    draw        the first token id at which the cumulated probability of those left exceeds the uniform number

Equals are never told apart by the order a library happens to sort them in. Log-probabilities and ranks are of the raw
logits. A row whose logits are not finite fails alone. The logits are on the host: what is drawn must not depend on a
device's way to sum, nor on how many threads or rows a library sums with: sums run in the order of the tokens (`_sums`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.draws import uniform
from quire.backends.torch import native
from quire.backends.torch.token_lists import Mask, Numbers, RowLists, TokenLists
from quire.core.step import UNSATISFIABLE, Sampling, TokenLogprobs
from quire.errors import InvariantError

NUM_CANDIDATES = 1024
"""Likeliest tokens looked at first for top-p; nearly always enough, and far cheaper than sorting a vocabulary."""
MAX_SLICE_VALUES = 1 << 21
"""Numbers of a slice of rows handled together: what bounds the memory sampling takes, whatever the vocabulary."""
COLUMN_DEPTH = 64
"""Tokens of a column in which the likeliest are looked for: few columns to sort, and few tokens in each to look at."""
NEG_INF = float("-inf")
LEAST_EXPONENT = -746.0
"""Below it exp is 0: the least number there is is e to the -745.13."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for one row, or why there is none."""

    token_id: int | None
    error: str | None = None


def choose(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    kept: Sequence[RowLists] | None = None,
    masks: Sequence[bytes | None] | None = None,
) -> list[Choice]:
    """One token for each row of `logits` ([row, vocabulary]), each by its own sampling and among those its mask allows.

    What was kept for the rows saves work and changes nothing.
    """
    if kept is None:
        kept = [RowLists(TokenLists(one.params, logits.shape[1])) for one in samplings]
    if masks is None:
        masks = [None] * len(samplings)
    rows = [_Row(sampling, lists, mask) for sampling, lists, mask in zip(samplings, kept, masks, strict=True)]
    likeliest, is_finite = _likeliest(logits)
    choices = [Choice(token_id) for token_id in likeliest]
    struck, shifted = [], []
    for at, row in enumerate(rows):
        if not is_finite[at]:
            choices[at] = Choice(None, "the model's logits are not finite")
        elif not row.is_greedy or row.is_shifted:
            shifted.append(at)
        elif row.struck is not None:
            struck.append(at)
    for call, others in ((_choose_left, struck), (_choose_shifted, shifted)):
        for part in _slices(others, logits.shape[1]):
            for at, choice in zip(part, call(logits[part], [rows[at] for at in part]), strict=True):
                choices[at] = choice
    return choices


def _likeliest(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Each row's likeliest token, the smallest id among equals, and whether all its numbers are finite."""
    if logits.dtype == torch.float32 and logits.stride(-1) == 1 and native.available().is_available:
        tokens, is_finite = native.argmax(logits)
        return tokens.tolist(), is_finite.tolist()
    return logits.argmax(dim=-1).tolist(), torch.isfinite(logits).all(dim=-1).tolist()


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of one token for each row, with the likeliest alternatives, of the raw logits."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()  # exact, and numpy can look at it
    values = logits.numpy()
    # Shifted by the peak: the sum of exponentials of large logits would swallow their differences.
    peaks = values.max(axis=1).astype(np.float64)
    below = logits.to(torch.float64, copy=True).sub_(torch.from_numpy(peaks).unsqueeze(1))
    norms = [math.log(total) for total in _sums(below.exp_()).flatten().tolist()]
    likeliest = _likeliest_tokens(values, max(num_alternatives, default=0))
    reports = []
    for at, token_id in enumerate(token_ids):
        row, peak, norm = values[at], float(peaks[at]), norms[at]
        alternatives = tuple((other, (value - peak) - norm) for other, value in likeliest[at][: num_alternatives[at]])
        rank = int(np.count_nonzero(row > row[token_id])) + 1
        reports.append(TokenLogprobs(token_id, (float(row[token_id]) - peak) - norm, rank, alternatives))
    return reports


def _sums(values: torch.Tensor) -> torch.Tensor:
    """[row, 1], each summed from left to right: torch's own sum of a row depends on threads and on other rows."""
    return torch.cumsum(values, dim=-1)[:, -1:]


def _likeliest_tokens(values: NDArray[Any], count: int) -> list[list[tuple[int, float]]]:
    """Each row's `count` likeliest tokens with their logits, the smaller id first among equals; at most all there are.

    A row is cut into columns, so many that the `count` largest of their peaks are a first guess: no token below the
    least of these can be among the likeliest. What is in the columns that reach it is looked at, and nothing else.
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
    """What one row is asked, and what was kept for it."""

    sampling: Sampling
    kept: RowLists
    mask: bytes | None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.params.temperature == 0.0 or self.sampling.params.top_k == 1

    @property
    def is_shifted(self) -> bool:
        """Whether its numbers are changed before the likeliest can be taken."""
        return self.sampling.params.needs_known_tokens or bool(self.sampling.params.logit_bias)

    @property
    def struck(self) -> Mask | None:
        struck = self.kept.lists.struck(is_early=self.sampling.num_output_tokens < self.sampling.params.min_tokens)
        return struck if self.mask is None else self.kept.lists.masked(struck, self.mask)

    @property
    def known(self) -> tuple[int, ...]:
        if self.sampling.known_tokens is None:
            raise InvariantError("penalties need the known tokens, the plan has none")
        return self.sampling.known_tokens


def _choose_left(logits: torch.Tensor, rows: Sequence[_Row]) -> list[Choice]:
    """The likeliest of the tokens that are left."""
    left = logits if logits.dtype == torch.float32 else logits.double()
    values = left.numpy()
    _strike_out(values, rows)
    tokens, _ = _likeliest(left)
    return [_choice(token_id, row[token_id] == NEG_INF, len(row)) for token_id, row in zip(tokens, values, strict=True)]


def _choose_shifted(logits: torch.Tensor, rows: Sequence[_Row]) -> list[Choice]:
    shifted = logits.double()
    values = shifted.numpy()
    for numbers, row in zip(values, rows, strict=True):
        _penalise(numbers, row)
        if row.sampling.params.logit_bias:
            np.add.at(numbers, *row.kept.lists.biases)
    _strike_out(values, rows)
    is_empty = (shifted.amax(dim=-1) == NEG_INF).tolist()
    tokens = shifted.argmax(dim=-1).tolist()
    drawn = [at for at, row in enumerate(rows) if not row.is_greedy and not is_empty[at]]
    if drawn:
        picked = _draw(shifted[drawn], [rows[at].sampling for at in drawn])
        for at, token_id in zip(drawn, picked, strict=True):
            tokens[at] = token_id
    return [_choice(token_id, empty, logits.shape[1]) for token_id, empty in zip(tokens, is_empty, strict=True)]


def _choice(token_id: int, is_empty: bool, vocabulary_size: int) -> Choice:
    if is_empty:
        return Choice(None, UNSATISFIABLE[0])
    if token_id >= vocabulary_size:
        return Choice(None, UNSATISFIABLE[1])
    return Choice(token_id)


def _penalise(values: Numbers, row: _Row) -> None:
    """Repetition over every known token; presence and frequency by how often a token was produced."""
    params = row.sampling.params
    if params.repetition_penalty != 1.0:
        ids, _ = row.kept.known.of(row.known)
        found = values[ids]
        values[ids] = np.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = row.kept.produced.of(row.known[row.sampling.num_prompt_tokens :])
        values[ids] = values[ids] - params.presence_penalty - params.frequency_penalty * counts


def _strike_out(values: NDArray[Any], rows: Sequence[_Row]) -> None:
    # By numpy: a row is too short for threads to be worth waking, and torch would wake them.
    for numbers, row in zip(values, rows, strict=True):
        if (struck := row.struck) is not None:
            numbers[struck] = NEG_INF


def _draw(values: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    temperatures = torch.tensor([one.params.temperature for one in samplings], dtype=torch.float64)
    # Shifting by the peak first keeps a tiny temperature from making infinities of finite logits.
    values = (values - values.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    _keep_min_p(values, [one.params.min_p for one in samplings])
    _keep_top_k(values, [one.params.top_k for one in samplings])
    weights = _exp(values)
    _keep_top_p(weights, [one.params.top_p for one in samplings])
    cumulated = torch.cumsum(weights, dim=-1)
    numbers = torch.tensor(
        [uniform(one.seed, one.sequence_index, one.position) for one in samplings], dtype=torch.float64
    )
    found: list[int] = (
        torch.searchsorted(cumulated, numbers.unsqueeze(1) * cumulated[:, -1:], right=True).flatten().tolist()
    )
    return found


def _exp(values: torch.Tensor) -> torch.Tensor:
    """exp, with the zeros filled in: libraries take ten times as long over a number whose exp no number can hold."""
    if bool(values.amin() >= LEAST_EXPONENT):
        return torch.exp(values)
    is_zero = values < LEAST_EXPONENT
    return values.masked_fill(is_zero, 0.0).exp_().masked_fill_(is_zero, 0.0)


def _keep_min_p(values: torch.Tensor, min_ps: Sequence[float]) -> None:
    """The likeliest token stands at 0, so its likelihood relative to any other is exp of their distance."""
    if any(min_ps):
        borders = torch.tensor(min_ps, dtype=torch.float64).unsqueeze(1)
        values.masked_fill_(_exp(values) < borders, NEG_INF)


def _keep_top_k(values: torch.Tensor, top_ks: Sequence[int]) -> None:
    limits = [min(k, values.shape[1]) if k else values.shape[1] for k in top_ks]
    rows = [at for at, limit in enumerate(limits) if limit < values.shape[1]]
    if rows:
        likeliest = values[rows].topk(max(limits[at] for at in rows)).values
        borders = likeliest.gather(1, torch.tensor([[limits[at] - 1] for at in rows]))
        values[rows] = values[rows].masked_fill(values[rows] < borders, NEG_INF)


def _keep_top_p(weights: torch.Tensor, top_ps: Sequence[float]) -> None:
    rows = [at for at, top_p in enumerate(top_ps) if top_p < 1.0]
    if not rows:
        return
    masses = _sums(weights[rows]) * torch.tensor([[top_ps[at]] for at in rows], dtype=torch.float64)
    candidates = weights[rows].topk(min(NUM_CANDIDATES, weights.shape[1])).values
    if bool((_sums(candidates) < masses).any()):
        candidates = weights[rows].sort(dim=-1, descending=True).values
    likelier = torch.cumsum(candidates, dim=-1) - candidates
    last_kept = (likelier < masses).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    borders = candidates.gather(1, last_kept)
    weights[rows] = weights[rows].masked_fill(weights[rows] < borders, 0.0)


def _slices(rows: Sequence[int], vocabulary_size: int) -> list[Sequence[int]]:
    count = max(1, MAX_SLICE_VALUES // vocabulary_size)
    return [rows[first : first + count] for first in range(0, len(rows), count)]
