"""Steps run when a model has been loaded, to measure their peak memory and their duration.

The worst steps have the maximum number of rows, every output that a request can ask for, and the longest sequences.
"""

from collections.abc import Callable
from time import perf_counter, process_time

from quire.backends import memory_plan
from quire.backends.protocol import Capacity
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.scheduling.step_cost import StepCost
from quire.core.step import Sampling, Scoring, StepPlan, WorkItem

TAIL_TOKENS = 32
"""Prompt tokens fed at the end of the longest sequence."""


def worst_plans(settings: ModelSettings, longest: int, decode_tokens: int) -> tuple[StepPlan, StepPlan]:
    """Return a prefill and a decode step, all in block 1; decode rows after the first have `decode_tokens` tokens."""
    num_fed, tail = min(settings.max_step_tokens, longest), min(TAIL_TOKENS, longest)
    table = (1,) * -(-longest // settings.block_size)
    prompts = [_scored(0, num_fed, 0, table)]
    if num_fed > tail:
        prompts = [_scored(0, num_fed - tail, 0, table), _scored(1, tail, longest - tail, table)]
    if settings.max_running == 1:
        prompts = prompts[:1]  # there may be only one state slot
    params = ResolvedSampling(
        top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
    )
    decoding = [
        WorkItem(
            at,
            (1,),
            position,
            table,
            Sampling(params, 1, 0, position + 1, 1, (1,) * (position + 1)),
            state_slot=at + 1,
        )
        for at in range(settings.max_running)
        for position in [longest - 1 if at == 0 else min(longest, decode_tokens) - 1]
    ]
    return StepPlan(0, (), tuple(prompts)), StepPlan(1, (), tuple(decoding))


def measured_bytes(run: Callable[[StepPlan], object], plans: tuple[StepPlan, ...]) -> int:
    """Run these steps and return their peak memory beyond the memory used before."""
    memory_plan.forget_peak()
    before = memory_plan.resident_bytes()
    for plan in plans:
        run(plan)
    return max(0, memory_plan.peak_bytes() - before)


def _scored(sequence_id: int, num_tokens: int, first: int, table: tuple[int, ...]) -> WorkItem:
    """Return a prefill item that requests every output available for prompts."""
    tokens = (1,) * num_tokens
    scoring = Scoring(first + 1, tokens, 5)
    return WorkItem(sequence_id, tokens, first, table, scoring=scoring, state_slot=sequence_id + 1)


# -- how long steps take -----------------------------------------------------------------------------------------------

FIRST_SIZES = (1, 8)
"""Token counts of the steps that are always measured; two points define a line."""
MORE_SIZES = (32, 16, 4, 2)
"""Token counts measured while time remains, the most informative first."""
ENOUGH_S = 0.2
"""Time in seconds after which no further step is started, because large models already load slowly."""


def measured_cost(run: Callable[[StepPlan], object], capacity: Capacity) -> StepCost | None:
    """Measure the cost of a runner's steps; None if steps are too small.

    Each step feeds one sequence with wrong drafts after its first token, and its KV is discarded. The unit is CPU time
    of all threads: only ratios matter, and CPU time does not include other processes.
    """
    most = min(capacity.max_step_tokens, capacity.max_sequence_tokens - 1, capacity.num_blocks * capacity.block_size)
    if most < FIRST_SIZES[-1]:
        return None
    plans = {size: _guessed(size, capacity.block_size) for size in (*FIRST_SIZES, *MORE_SIZES) if size <= most}
    run(plans[FIRST_SIZES[-1]])  # one-time work of the first step is not part of a step's cost
    started_s = perf_counter()
    points = {size: _seconds(run, plans[size]) for size in FIRST_SIZES}
    for size in (*MORE_SIZES, *FIRST_SIZES, *MORE_SIZES):
        if size in plans and perf_counter() - started_s < ENOUGH_S:
            # The minimum of a few runs, because other users of the caches only make a step longer.
            points[size] = min(points.get(size, float("inf")), _seconds(run, plans[size]))
    return StepCost.measured(points.items())


def _seconds(run: Callable[[StepPlan], object], plan: StepPlan) -> float:
    started_s = process_time()
    run(plan)
    return process_time() - started_s


def _guessed(num_tokens: int, block_size: int) -> StepPlan:
    """Return a step with one token followed by drafts."""
    blocks = tuple(range(1, -(-num_tokens // block_size) + 1))
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)
    return StepPlan(0, (), (WorkItem(0, (1,) * num_tokens, 0, blocks, sampling),))
