"""Logits to tokens: a pure function of each row's logits, parameters, known tokens, seed and position.

Everything after the raw logits happens in float64, in this order:

    penalties   repetition over all known tokens, presence and frequency over those produced
    bias        logit_bias is added; tokens not allowed, banned, or stopping too early are struck out
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.backends.draws import uniform
from quire.backends.torch import native
from quire.core.request import SamplingParams
from quire.core.step import ASKED_FOR_NOTHING, Sampling, TokenLogprobs
from quire.errors import InvariantError

NUM_CANDIDATES = 1024
"""Likeliest tokens looked at first for top-p; nearly always enough, and far cheaper than sorting a vocabulary."""
MAX_SLICE_VALUES = 1 << 21
"""Numbers of a slice of rows handled together: what bounds the memory sampling takes, whatever the vocabulary."""
NEG_INF = float("-inf")

RowsAndTokens = tuple[list[int], list[int]]
ParamValue = Callable[[SamplingParams], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for one row, or why there is none."""

    token_id: int | None
    error: str | None = None


def choose(logits: torch.Tensor, samplings: Sequence[Sampling]) -> list[Choice]:
    """One token for each row of `logits` ([row, vocabulary]), each by its own sampling."""
    likeliest, is_finite = _likeliest(logits)
    choices, others = [], []
    for at, sampling in enumerate(samplings):
        if not is_finite[at]:
            choices.append(Choice(None, "the model's logits are not finite"))
        elif _is_plain_greedy(sampling):
            choices.append(Choice(likeliest[at]))
        else:
            choices.append(Choice(None))
            others.append(at)
    for rows in _slices(others, logits.shape[1]):
        for at, choice in zip(rows, _choose_others(logits[rows], [samplings[at] for at in rows]), strict=True):
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
    values = logits.double()
    # Shifted by the peak: the sum of exponentials of large logits would swallow their differences.
    peaks = values.amax(dim=-1, keepdim=True)
    norms = [math.log(total) for total in _sums(torch.exp(values - peaks)).flatten().tolist()]
    chosen = values.gather(1, torch.tensor(token_ids).unsqueeze(1))
    ranks = ((values > chosen).sum(dim=-1) + 1).tolist()
    distances = (chosen - peaks).flatten().tolist()
    return [
        TokenLogprobs(
            token_ids[at],
            distances[at] - norms[at],
            ranks[at],
            _alternatives(values[at], float(peaks[at]), norms[at], num_alternatives[at]),
        )
        for at in range(len(values))
    ]


def _sums(values: torch.Tensor) -> torch.Tensor:
    """[row, 1], each summed from left to right: torch's own sum of a row depends on threads and on other rows."""
    return torch.cumsum(values, dim=-1)[:, -1:]


def _alternatives(values: torch.Tensor, peak: float, norm: float, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens, the smaller id first among equals."""
    if count == 0:
        return ()
    count = min(count, len(values))
    border = values.topk(count).values[-1]
    ids = torch.nonzero(values >= border).squeeze(1)
    ranked = sorted(zip((-values[ids]).tolist(), ids.tolist(), strict=True))
    return tuple((token_id, (-negated - peak) - norm) for negated, token_id in ranked[:count])


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def _is_plain_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest raw token is the answer."""
    params = sampling.params
    is_touched = (
        params.needs_known_tokens or params.logit_bias or params.allowed_token_ids is not None
        or params.banned_token_ids or (params.stop_token_ids and _is_early(sampling))
    )  # fmt: skip
    return _is_greedy(params) and not is_touched


def _choose_others(logits: torch.Tensor, samplings: Sequence[Sampling]) -> list[Choice]:
    values = logits.double()
    _penalise(values, samplings)
    _add_bias(values, samplings)
    _strike_out(values, samplings)
    is_empty = (values == NEG_INF).all(dim=-1).tolist()
    tokens = values.argmax(dim=-1).tolist()
    drawn = [at for at, one in enumerate(samplings) if not _is_greedy(one.params) and not is_empty[at]]
    if drawn:
        picked = _draw(values[drawn], [samplings[at] for at in drawn])
        for at, token_id in zip(drawn, picked, strict=True):
            tokens[at] = token_id
    return [_choice(token_id, empty, logits.shape[1]) for token_id, empty in zip(tokens, is_empty, strict=True)]


def _choice(token_id: int, is_empty: bool, vocabulary_size: int) -> Choice:
    if is_empty:
        return Choice(None, ASKED_FOR_NOTHING[0])
    if token_id >= vocabulary_size:
        return Choice(None, ASKED_FOR_NOTHING[1])
    return Choice(token_id)


def _penalise(values: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Repetition over every known token; presence and frequency by how often a token was produced."""
    for rows_and_tokens, is_output in ((_known(samplings), False), (_produced(samplings), True)):
        rows, tokens = rows_and_tokens
        if not rows:
            continue
        keys = torch.tensor(rows) * values.shape[1] + torch.tensor(tokens)
        keys, counts = torch.unique(keys, return_counts=True)
        at, tokens_at = keys // values.shape[1], keys % values.shape[1]
        found = values[at, tokens_at]
        if is_output:
            presence = _per_row(samplings, lambda params: params.presence_penalty)[at]
            frequency = _per_row(samplings, lambda params: params.frequency_penalty)[at]
            values[at, tokens_at] = found - presence - frequency * counts
        else:
            penalty = _per_row(samplings, lambda params: params.repetition_penalty)[at]
            values[at, tokens_at] = torch.where(found > 0, found / penalty, found * penalty)


def _known(samplings: Sequence[Sampling]) -> RowsAndTokens:
    wanted = [one.params.repetition_penalty != 1.0 for one in samplings]
    return _flat([_tokens(one) if want else () for one, want in zip(samplings, wanted, strict=True)])


def _tokens(sampling: Sampling) -> tuple[int, ...]:
    if sampling.known_tokens is None:
        raise InvariantError("penalties need the known tokens, the plan has none")
    return sampling.known_tokens


def _produced(samplings: Sequence[Sampling]) -> RowsAndTokens:
    return _flat(
        [
            _tokens(one)[one.num_prompt_tokens :] if one.params.presence_penalty or one.params.frequency_penalty else ()
            for one in samplings
        ]
    )


def _add_bias(values: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    rows = [at for at, one in enumerate(samplings) for _ in one.params.logit_bias]
    if rows:
        pairs = [pair for one in samplings for pair in one.params.logit_bias]
        tokens = torch.tensor([token_id for token_id, _ in pairs])
        biases = torch.tensor([bias for _, bias in pairs], dtype=torch.float64)
        values.index_put_((torch.tensor(rows), tokens), biases, accumulate=True)


def _strike_out(values: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    for at, one in enumerate(samplings):
        if one.params.allowed_token_ids is not None:
            kept = torch.tensor(one.params.allowed_token_ids, dtype=torch.int64)
            narrowed = torch.full_like(values[at], NEG_INF)
            narrowed[kept] = values[at, kept]
            values[at] = narrowed
    struck = [
        (*one.params.banned_token_ids, *(one.params.stop_token_ids if _is_early(one) else ())) for one in samplings
    ]
    rows, tokens = _flat(struck)
    if rows:
        values[torch.tensor(rows), torch.tensor(tokens)] = NEG_INF


def _is_early(sampling: Sampling) -> bool:
    return sampling.num_output_tokens < sampling.params.min_tokens


def _draw(values: torch.Tensor, samplings: Sequence[Sampling]) -> list[int]:
    temperatures = torch.tensor([one.params.temperature for one in samplings], dtype=torch.float64)
    # Shifting by the peak first keeps a tiny temperature from making infinities of finite logits.
    values = (values - values.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    _keep_min_p(values, [one.params.min_p for one in samplings])
    _keep_top_k(values, [one.params.top_k for one in samplings])
    weights = torch.exp(values)
    _keep_top_p(weights, [one.params.top_p for one in samplings])
    cumulated = torch.cumsum(weights, dim=-1)
    numbers = torch.tensor(
        [uniform(one.seed, one.sequence_index, one.position) for one in samplings], dtype=torch.float64
    )
    found: list[int] = (
        torch.searchsorted(cumulated, numbers.unsqueeze(1) * cumulated[:, -1:], right=True).flatten().tolist()
    )
    return found


def _keep_min_p(values: torch.Tensor, min_ps: Sequence[float]) -> None:
    """The likeliest token stands at 0, so its likelihood relative to any other is exp of their distance."""
    if any(min_ps):
        borders = torch.tensor(min_ps, dtype=torch.float64).unsqueeze(1)
        values.masked_fill_(torch.exp(values) < borders, NEG_INF)


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


def _flat(tokens_of_rows: Sequence[Sequence[int]]) -> RowsAndTokens:
    rows = [at for at, tokens in enumerate(tokens_of_rows) for _ in tokens]
    return rows, [token for tokens in tokens_of_rows for token in tokens]


def _per_row(samplings: Sequence[Sampling], value: ParamValue) -> torch.Tensor:
    return torch.tensor([value(one.params) for one in samplings], dtype=torch.float64)
