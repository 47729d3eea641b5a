"""Steps that are run when a model has been loaded: how much memory they take at most, and how long they take.

The worst have every row there may be, with all that can be requested of logits, and the longest sequences.
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
"""Of a prompt that stand at the end of the longest sequence."""


def worst_plans(settings: ModelSettings, longest: int, decode_tokens: int) -> tuple[StepPlan, StepPlan]:
    """A step of prompts and one of decoding sequences, all in block 1; each but the first of these so long."""
    num_fed, tail = min(settings.max_step_tokens, longest), min(TAIL_TOKENS, longest)
    table = (1,) * -(-longest // settings.block_size)
    prompts = [_scored(0, num_fed, 0, table)]
    if num_fed > tail:
        prompts = [_scored(0, num_fed - tail, 0, table), _scored(1, tail, longest - tail, table)]
    if settings.max_running == 1:
        prompts = prompts[:1]  # there may be one state slot and no more
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
    """The most that these steps took beside what was held before."""
    memory_plan.forget_peak()
    before = memory_plan.resident_bytes()
    for plan in plans:
        run(plan)
    return max(0, memory_plan.peak_bytes() - before)


def _scored(sequence_id: int, num_tokens: int, first: int, table: tuple[int, ...]) -> WorkItem:
    """An item of which all is wanted that can be of a prompt."""
    tokens = (1,) * num_tokens
    scoring = Scoring(first + 1, tokens, 5)
    return WorkItem(sequence_id, tokens, first, table, scoring=scoring, state_slot=sequence_id + 1)


# -- how long steps take -----------------------------------------------------------------------------------------------

FIRST_SIZES = (1, 8)
"""Tokens of the steps that are always run: two points make a line."""
MORE_SIZES = (32, 16, 4, 2)
"""Those that are run while there is time, the most telling first."""
ENOUGH_S = 0.2
"""No other step is begun after so long: who has a large model waits long enough for it."""


def measured_cost(run: Callable[[StepPlan], object], capacity: Capacity) -> StepCost | None:
    """What a runner's steps take; None if they hold too few tokens.

    Each is of one sequence with wrong guesses behind its token, and nothing is kept of it. Counted is processor time of
    all threads: only ratios matter, and what others take of the machine at this moment does not.
    """
    most = min(capacity.max_step_tokens, capacity.max_sequence_tokens - 1, capacity.num_blocks * capacity.block_size)
    if most < FIRST_SIZES[-1]:
        return None
    plans = {size: _guessed(size, capacity.block_size) for size in (*FIRST_SIZES, *MORE_SIZES) if size <= most}
    run(plans[FIRST_SIZES[-1]])  # what a first step does once is no part of what a step costs
    started_s = perf_counter()
    points = {size: _seconds(run, plans[size]) for size in FIRST_SIZES}
    for size in (*MORE_SIZES, *FIRST_SIZES, *MORE_SIZES):
        if size in plans and perf_counter() - started_s < ENOUGH_S:
            # The least of a few: others who use the machine's caches only ever make a step longer.
            points[size] = min(points.get(size, float("inf")), _seconds(run, plans[size]))
    return StepCost.measured(points.items())


def _seconds(run: Callable[[StepPlan], object], plan: StepPlan) -> float:
    started_s = process_time()
    run(plan)
    return process_time() - started_s


def _guessed(num_tokens: int, block_size: int) -> StepPlan:
    """One token, and guesses behind it."""
    blocks = tuple(range(1, -(-num_tokens // block_size) + 1))
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)
    return StepPlan(0, (), (WorkItem(0, (1,) * num_tokens, 0, blocks, sampling),))
