"""Steps that run while a model is loaded, to measure their peak memory and their cost.

The worst steps have the maximum number of rows, every output that a request can have, and the longest sequences.
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


def worst_plans(settings: ModelSettings, max_tokens: int, decode_tokens: int) -> tuple[StepPlan, StepPlan]:
    """Return a prefill and a decode step, all in block 1; decode rows after the first have `decode_tokens` tokens."""
    num_fed, num_tail = min(settings.max_step_tokens, max_tokens), min(TAIL_TOKENS, max_tokens)
    table = (1,) * -(-max_tokens // settings.block_size)
    prefills = [_prefill(0, num_fed, 0, table)]
    if num_fed > num_tail:
        prefills = [_prefill(0, num_fed - num_tail, 0, table), _prefill(1, num_tail, max_tokens - num_tail, table)]
    if settings.max_running == 1:
        prefills = prefills[:1]  # there may be only one state slot
    params = ResolvedSampling(
        top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
    )
    decodes = [
        WorkItem(
            slot,
            (1,),
            position,
            table,
            Sampling(params, 1, 0, position + 1, 1, (1,) * (position + 1)),
            state_slot=slot + 1,
        )
        for slot in range(settings.max_running)
        for position in [max_tokens - 1 if slot == 0 else min(max_tokens, decode_tokens) - 1]
    ]
    return StepPlan(0, (), tuple(prefills)), StepPlan(1, (), tuple(decodes))


def measure_peak_bytes(run: Callable[[StepPlan], object], plans: tuple[StepPlan, ...]) -> int:
    """Run these steps and return by how much their peak memory exceeds the memory used before."""
    memory_plan.reset_peak()
    baseline_bytes = memory_plan.resident_bytes()
    for plan in plans:
        run(plan)
    return max(0, memory_plan.peak_bytes() - baseline_bytes)


def _prefill(sequence_id: int, num_tokens: int, first: int, table: tuple[int, ...]) -> WorkItem:
    """Return a prefill item that requests every output available for prompts."""
    tokens = (1,) * num_tokens
    scoring = Scoring(first + 1, tokens, 5)
    return WorkItem(sequence_id, tokens, first, table, scoring=scoring, state_slot=sequence_id + 1)


# -- the cost of steps -------------------------------------------------------------------------------------------------

FIRST_SIZES = (1, 8)
"""Token counts of the steps that are always measured; two points define a line."""
MORE_SIZES = (32, 16, 4, 2)
"""Token counts measured while time remains, the most informative first."""
MAX_MEASURE_S = 0.2
"""No step starts later than this, because large models already load slowly."""


def measure_step_cost(run: Callable[[StepPlan], object], capacity: Capacity) -> StepCost | None:
    """Measure the cost of a runner's steps by size; None if the runner's limits allow only smaller steps.

    Each step feeds one sequence with wrong drafts after its first token; its KV is not used again. The unit is CPU time
    of all threads: only ratios matter, and CPU time does not include other processes.
    """
    limit = min(capacity.max_step_tokens, capacity.max_sequence_tokens - 1, capacity.num_blocks * capacity.block_size)
    if limit < FIRST_SIZES[-1]:
        return None
    plans = {size: _draft_plan(size, capacity.block_size) for size in (*FIRST_SIZES, *MORE_SIZES) if size <= limit}
    run(plans[FIRST_SIZES[-1]])  # the first step also does one-time work
    started_s = perf_counter()
    seconds_by_size = {size: _seconds(run, plans[size]) for size in FIRST_SIZES}
    for size in (*MORE_SIZES, *FIRST_SIZES, *MORE_SIZES):
        if size in plans and perf_counter() - started_s < MAX_MEASURE_S:
            # The minimum of a few runs, because contention for caches can only make a step longer.
            seconds_by_size[size] = min(seconds_by_size.get(size, float("inf")), _seconds(run, plans[size]))
    return StepCost.from_measurements(seconds_by_size.items())


def _seconds(run: Callable[[StepPlan], object], plan: StepPlan) -> float:
    started_s = process_time()
    run(plan)
    return process_time() - started_s


def _draft_plan(num_tokens: int, block_size: int) -> StepPlan:
    """Return a step with one token followed by drafts."""
    blocks = tuple(range(1, -(-num_tokens // block_size) + 1))
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)
    return StepPlan(0, (), (WorkItem(0, (1,) * num_tokens, 0, blocks, sampling),))
