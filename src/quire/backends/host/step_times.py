"""How long steps take by the tokens they feed, found by running some when a model has been loaded.

A step of one sequence with guesses behind its token, all of them wrong: what a guess costs is what one more token in
such a step costs, with its row of logits and its choice. Nothing is kept: blocks that hold it are not named.

Counted is processor time, of all threads: only ratios matter, and what others take of the machine at this moment says
nothing about it.
"""

from collections.abc import Callable
from time import perf_counter, process_time

from quire.backends.protocol import Capacity
from quire.core.request import ResolvedSampling
from quire.core.scheduling.step_cost import StepCost
from quire.core.step import Sampling, StepPlan, WorkItem

FIRST_SIZES = (1, 8)
"""Tokens of the steps that are always run: two points make a line."""
MORE_SIZES = (32, 16, 4, 2)
"""Those that are run while there is time, the most telling first."""
ENOUGH_S = 0.2
"""No other step is begun after so long: who has a large model waits long enough for it."""


def measured_cost(run: Callable[[StepPlan], object], capacity: Capacity) -> StepCost | None:
    """What a runner's steps take; None if they hold too few tokens to tell."""
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
    blocks = tuple(range(1, -(-num_tokens // block_size) + 1))
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, 1, 1, None)
    return StepPlan(0, (), (WorkItem(0, (1,) * num_tokens, 0, blocks, sampling),))
