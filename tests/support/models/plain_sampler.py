"""The sampler a second time, one row at a time, in loops over plain numbers: slow, and simple enough to be believed.

The sampler works on whole batches and takes shortcuts. Here is what it must come to, written from
its promises and not from its code. `survey` has both choose for random rows and reports where they part.

Two honest implementations may differ where rounding decides. So every plain choice carries a `margin`: how far the
nearest border was that would have changed the answer. Below `NEAR_TIE` a difference means nothing, above it is a bug.
Equal values are no near tie: what happens to them is promised.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.backends.host.drawing import uniform
from quire.backends.host.sampler import Choice, choose, logprobs_of
from quire.backends.kernels.products import round_to_dtype
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, TokenLogprobs

NEAR_TIE = 1e-9
LARGEST_BATCH = 33
LARGEST_VOCABULARY = 60
DTYPES = ["float32", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """The token, or why there is none, and how far the nearest border was."""

    token_id: int | None
    error: str | None = None
    margin: float = math.inf


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler is asked for one sequence."""

    logits: list[float]
    sampling: Sampling
    num_alternatives: int = 0
    masked: frozenset[int] | None = None
    """The tokens that its mask leaves; None: it has no mask."""

    def mask(self) -> bytes | None:
        """As the step hands it over: one bit for each token."""
        if self.masked is None:
            return None
        bits = sum(1 << token_id for token_id in self.masked)
        return bits.to_bytes(-(-len(self.logits) // 8), "little")


@dataclass
class SamplerSurvey:
    """How often the two agreed."""

    num_rows: int = 0
    num_near_ties: int = 0
    """Rows that rounding may decide; their token is not compared."""
    num_failed: int = 0
    """Rows for which there is no token to choose, as both say."""
    wrong: list[str] = field(default_factory=list)


# --- one row, plainly -----------------------------------------------------------------------------------------------


def plain_choice(logits: list[float], sampling: Sampling, masked: frozenset[int] | None = None) -> PlainChoice:
    """The token this row must give, among those its mask leaves."""
    params = sampling.params
    if not all(math.isfinite(value) for value in logits):
        return PlainChoice(None, "not finite")
    left = _strike_out(_shift(logits, sampling), sampling)
    if masked is not None:
        left = {token_id: value for token_id, value in left.items() if token_id in masked}
    if not left:
        return PlainChoice(None, "nothing is left")
    if params.temperature == 0.0 or params.top_k == 1:
        return _likeliest(left)
    left = {token_id: value / params.temperature for token_id, value in left.items()}
    left, min_p_margin = _min_p(left, params.min_p)
    left, top_k_margin = _top_k(left, params.top_k)
    left, top_p_margin = _top_p(left, params.top_p)
    token_id, draw_margin = _draw(left, uniform(sampling.seed, sampling.sequence_index, sampling.position))
    return PlainChoice(token_id, margin=min(min_p_margin, top_k_margin, top_p_margin, draw_margin))


def plain_logprobs(logits: list[float], token_id: int, num_alternatives: int) -> TokenLogprobs:
    """What must be reported about this token of this row."""
    largest = max(logits)
    log_total = math.log(math.fsum(math.exp(value - largest) for value in logits))
    ids = sorted(range(len(logits)), key=lambda other: (-logits[other], other))
    return TokenLogprobs(
        token_id,
        logits[token_id] - largest - log_total,
        1 + sum(value > logits[token_id] for value in logits),
        tuple((other, logits[other] - largest - log_total) for other in ids[:num_alternatives]),
    )


def _shift(logits: list[float], sampling: Sampling) -> list[float]:
    """Penalties, then bias."""
    params = sampling.params
    values = list(logits)
    known = sampling.known_tokens or ()
    for token_id in set(known):
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    produced = known[sampling.num_prompt_tokens :]
    for token_id in set(produced):
        values[token_id] -= params.presence_penalty
        values[token_id] -= params.frequency_penalty * produced.count(token_id)
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    return values


def _strike_out(values: list[float], sampling: Sampling) -> dict[int, float]:
    """The tokens that may be chosen, in id order."""
    params = sampling.params
    struck_out = set(params.banned_token_ids)
    if sampling.num_output_tokens < params.min_tokens:
        struck_out |= params.stop_token_ids
    if params.allowed_token_ids is not None:
        struck_out |= set(range(len(values))) - set(params.allowed_token_ids)
    return {token_id: value for token_id, value in enumerate(values) if token_id not in struck_out}


def _likeliest(left: dict[int, float]) -> PlainChoice:
    best = min(left, key=lambda token_id: (-left[token_id], token_id))
    others = [value for value in left.values() if value < left[best]]
    return PlainChoice(best, margin=_gap(left[best], max(others)) if others else math.inf)


def _min_p(left: dict[int, float], min_p: float) -> tuple[dict[int, float], float]:
    """Those at least `min_p` times as likely as the likeliest; equals of the likeliest stay whatever rounding does."""
    largest = max(left.values())
    kept = {}
    margin = math.inf
    for token_id, value in left.items():
        ratio = math.exp(value - largest)
        if value == largest or ratio >= min_p:
            kept[token_id] = value
        if value != largest and min_p > 0.0:
            margin = min(margin, abs(ratio - min_p) / min_p)
    return kept, margin


def _top_k(left: dict[int, float], top_k: int) -> tuple[dict[int, float], float]:
    """Those not below the k-th largest."""
    if top_k == 0 or top_k >= len(left):
        return left, math.inf
    border = sorted(left.values(), reverse=True)[top_k - 1]
    kept = {token_id: value for token_id, value in left.items() if value >= border}
    margin = min((_gap(border, value) for value in left.values() if value != border), default=math.inf)
    return kept, margin


def _top_p(left: dict[int, float], top_p: float) -> tuple[dict[int, float], float]:
    """Those of which the strictly likelier ones hold less than `top_p`. They never hold all: 1 keeps everything."""
    if top_p >= 1.0:
        return left, math.inf
    levels = sorted(set(left.values()), reverse=True)
    mass = dict.fromkeys(levels, 0.0)
    for value in left.values():
        mass[value] += math.exp(value - levels[0])
    total = math.fsum(mass.values())
    kept_levels = set()
    margin = math.inf
    likelier = 0.0
    for at, level in enumerate(levels):
        if likelier / total < top_p:
            kept_levels.add(level)
        elif levels[at - 1] in kept_levels:
            margin = min(margin, levels[at - 1] - level)
        if at > 0:
            margin = min(margin, abs(likelier / total - top_p))
        likelier += mass[level]
    return {token_id: value for token_id, value in left.items() if value in kept_levels}, margin


def _draw(left: dict[int, float], number: float) -> tuple[int, float]:
    """The first token at which the cumulated weight exceeds this part of the total."""
    largest = max(left.values())
    borders = list(accumulate(math.exp(value - largest) for value in left.values()))
    total = borders[-1]
    point = number * total
    at = next(at for at, border in enumerate(borders) if border > point)
    margin = math.inf
    if at > 0 and borders[at - 1] > 0.0:
        margin = min(margin, (point - borders[at - 1]) / total)
    if borders[at] < total:
        margin = min(margin, (borders[at] - point) / total)
    return list(left)[at], margin


def _gap(one: float, other: float) -> float:
    """How far two values are apart, in proportion."""
    return abs(one - other) / max(abs(one), abs(other))


# --- random rows ----------------------------------------------------------------------------------------------------


def random_rows(random: Random, count: int) -> list[Row]:
    """Rows of one batch: one vocabulary, everything else at random."""
    size = random.randint(2, LARGEST_VOCABULARY)
    return [
        Row(
            random_logits(random, size),
            random_sampling(random, size),
            random.choice([0, 1, 5, size - 1, size]),
            random_mask(random, size),
        )
        for _ in range(count)
    ]


def random_mask(random: Random, size: int) -> frozenset[int] | None:
    """None, one token, a few, all, or any."""
    counts = [None, None, 1, 3, size, random.randint(0, size)]
    count = random.choice(counts)
    return None if count is None else frozenset(random.sample(range(size), min(count, size)))


def random_logits(random: Random, size: int) -> list[float]:
    """Flat, peaked, huge, tiny, negative, full of equals, and now and then not finite."""
    shape = random.randrange(8)
    if shape == 0:
        logits = [random.randint(-8, 8) / 4 for _ in range(size)]
    elif shape == 1:
        logits = [random.choice([-1.5, 2.0])] * size
    elif shape == 2:
        logits = [random.choice([-1e4, -1e4, 1e4, 3e4, 1e30, -1e30, 0.0, -0.0, 1.0]) for _ in range(size)]
    elif shape == 3:
        logits = [random.uniform(-90.0, -1.0) for _ in range(size)]
    elif shape == 4:
        logits = [random.gauss(0.0, 1e-3) for _ in range(size)]
    else:
        spread = random.choice([0.3, 1.0, 3.0, 10.0])
        logits = [random.gauss(0.0, spread) for _ in range(size)]
    if random.random() < 0.2:
        logits[random.randrange(size)] = random.choice([20.0, 60.0, 900.0])
    if random.random() < 0.04:
        logits[random.randrange(size)] = random.choice([math.nan, math.inf, -math.inf])
    return logits


def random_sampling(random: Random, size: int) -> Sampling:
    """Every parameter given or not, each by its own die."""
    favourites = [random.randrange(size) for _ in range(random.randint(1, 5))]

    def token() -> int:
        return random.choice(favourites) if random.random() < 0.6 else random.randrange(size)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(token() for _ in range(random.randint(0, most)))

    given: dict[str, Any] = {
        "temperature": random.choice([0.0, 1e-6, 1e-3, 0.3, 0.7, 1.5, 30.0, 1e4, 1e12]),
        "top_k": random.choice([1, 2, 3, 10, size - 1, size, size + 1, 10_000]),
        "top_p": random.choice([1e-6, 0.05, 0.5, 0.9, 0.999, random.random() or 0.5]),
        "min_p": random.choice([1e-6, 0.05, 0.5, 1.0, random.random()]),
        "repetition_penalty": random.choice([0.5, 0.9, 1.25, 2.0, 10.0, random.uniform(0.1, 3.0)]),
        "presence_penalty": random.choice([-2.0, -0.5, 0.25, 2.0, random.uniform(-2.0, 2.0)]),
        "frequency_penalty": random.choice([-2.0, -0.5, 0.25, 2.0, random.uniform(-2.0, 2.0)]),
        "logit_bias": tuple((token(), random.choice([-100.0, -1.5, 0.5, 3.0, 100.0])) for _ in range(4)),
        "allowed_token_ids": random.choice([tokens(3), tokens(size), tuple(range(size))]),
        "banned_token_ids": random.choice([tokens(3), tokens(2 * size)]),
        "stop_token_ids": frozenset(tokens(3)),
        "min_tokens": random.randint(1, 6),
    }
    params = ResolvedSampling(**{name: value for name, value in given.items() if random.random() < 0.35})
    num_prompt_tokens = random.randint(1, 12)
    num_output_tokens = random.choice([0, 1, 2, 5, 30])
    known = tuple(token() for _ in range(num_prompt_tokens + num_output_tokens))
    return Sampling(
        params,
        seed=random.choice([0, -1, random.randrange(2**32), random.randrange(2**64, 2**80), -random.randrange(2**70)]),
        sequence_index=random.choice([0, 0, 1, 127]),
        position=len(known),
        num_prompt_tokens=num_prompt_tokens,
        known_tokens=known if params.needs_known_tokens else None,
    )


# --- the two side by side -------------------------------------------------------------------------------------------


def survey(count: int, seed: int) -> SamplerSurvey:
    """Compare at least this many random rows, in batches, the same for the same seed."""
    random = Random(seed)
    found = SamplerSurvey()
    while found.num_rows < count:
        compare(random_rows(random, random.randint(1, LARGEST_BATCH)), random.choice(DTYPES), found, f"seed {seed}")
    return found


def logits_of(rows: list[Row], dtype: str) -> NDArray[Any]:
    """The rows' numbers as this type holds them; numpy has no bfloat16, and float32 holds it exactly."""
    numbers = [row.logits for row in rows]
    with np.errstate(over="ignore"):
        return round_to_dtype(np.array(numbers, np.float32), dtype) if dtype == "bfloat16" else np.array(numbers, dtype)


def compare(rows: list[Row], dtype: str, found: SamplerSurvey, name: str) -> None:
    """Have both choose for this batch, and add what comes out to `found`."""
    logits = logits_of(rows, dtype)
    before = logits.copy()
    masks = [row.mask() for row in rows]
    choices = choose(logits, [row.sampling for row in rows], masks=masks)
    if not np.array_equal(logits, before, equal_nan=True):
        found.wrong.append(f"{name}: the logits were changed")
    for at, (row, choice) in enumerate(zip(rows, choices, strict=True)):
        values = logits[at].tolist()
        plain = plain_choice(values, row.sampling, row.masked)
        faults = _faults(choice, plain)
        if choose(logits[at : at + 1], [row.sampling], masks=[masks[at]]) != [choice]:
            faults.append("not the same alone")
        found.wrong += [
            f"{name}, row {found.num_rows}, {dtype}: {fault}: {values} {row.sampling} {row.masked}" for fault in faults
        ]
        found.num_rows += 1
        found.num_near_ties += plain.margin < NEAR_TIE
        found.num_failed += plain.error is not None
    found.wrong += [f"{name}, {dtype}: {fault}" for fault in _logprob_faults(rows, logits, choices)]


def _faults(choice: Choice, plain: PlainChoice) -> list[str]:
    if (choice.error is None) == (choice.token_id is None):
        return [f"neither a token nor an error: {choice}"]
    if (choice.error is None) != (plain.error is None):
        return [f"{choice} instead of {plain}"]
    if choice.token_id != plain.token_id and plain.margin >= NEAR_TIE:
        return [f"{choice} instead of {plain}"]
    return []


def _logprob_faults(rows: list[Row], logits: NDArray[Any], choices: list[Choice]) -> list[str]:
    """Of the chosen token where there is one, and of the last in the vocabulary."""
    asked = [
        (at, token_id)
        for at, choice in enumerate(choices)
        for token_id in (choice.token_id, logits.shape[1] - 1)
        if token_id is not None and np.isfinite(logits[at]).all()
    ]
    if not asked:
        return []
    numbers = [rows[at].num_alternatives for at, _ in asked]
    together = logprobs_of(logits[[at for at, _ in asked]], [token_id for _, token_id in asked], numbers)
    faults = []
    for (at, token_id), number, given in zip(asked, numbers, together, strict=True):
        wanted = plain_logprobs(logits[at].tolist(), token_id, number)
        if not _same_logprobs(given, wanted):
            faults.append(f"{given} instead of {wanted}: {logits[at].tolist()}")
        if logprobs_of(logits[at : at + 1], [token_id], [number]) != [given]:
            faults.append(f"not the same alone: {given}: {logits[at].tolist()}")
    return faults


def _same_logprobs(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    def ids(report: TokenLogprobs) -> tuple[int, ...]:
        return report.token_id, report.rank, *(token_id for token_id, _ in report.alternatives)

    def numbers(report: TokenLogprobs) -> list[float]:
        return [report.logprob, *(logprob for _, logprob in report.alternatives)]

    return ids(one) == ids(other) and all(
        math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-9)
        for mine, theirs in zip(numbers(one), numbers(other), strict=True)
    )
