"""Makes an engine's snapshots while it is watched: between planning a step and running it, and while it is idle.

Without a watcher `Engine.watch` is None and a step has no extra cost. The map of a large pool is drawn piece by piece,
a few at each step, so that no step waits long for it; the tree map, the most expensive part, is drawn less often.
"""

from collections import deque
from collections.abc import Callable, Iterator

from quire.core.inspect.pool_map import PIECE_BLOCKS, PoolDrawing
from quire.core.inspect.snapshots import (
    MAX_RUNNING_SHOWN,
    MAX_STEPS_SHOWN,
    EngineSnapshot,
    RunningFigures,
    StepFigures,
    TreePicture,
)
from quire.core.inspect.tree_map import TreeDrawing
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.sequence import Sequence
from quire.core.step import StepPlan

WORK_S = 0.002
"""Longest time that a step waits for drawing, unless WORK_SHARE allows more."""
WORK_SHARE = 0.02
"""Longest time that a step waits for drawing, as a share of the previous step's duration."""
MAX_STEP_S = 1.0
"""Cap on the assumed duration of the previous step, because the time between two calls includes idle time."""
POOL_SHARE = 0.01
"""Longest share of time spent on drawing large pools; beyond it, snapshots are less frequent than requested."""
TREE_SHARE = 0.005
MAX_TREE_AGE_S = 30.0

MonotonicClock = Callable[[], float]
ShowSnapshot = Callable[[EngineSnapshot], None]


class EngineWatch:
    """Makes snapshots; exists while the engine has watchers."""

    def __init__(self, scheduler: Scheduler, memory: KVMemory, period_s: float, show: ShowSnapshot) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._show = show
        self._period_s = period_s
        self._due_s = self._tree_due_s = float("-inf")
        self._last_work_s: float | None = None
        """Time of the last call of `work`."""
        self._pool: tuple[PoolDrawing, Iterator[None]] | None = None
        self._tree: tuple[TreeDrawing, Iterator[None]] | None = None
        self._pool_s = self._tree_s = 0.0
        """Time spent so far on each map in progress."""
        self._tree_drawn = TreePicture()
        self._steps: deque[tuple[StepFigures, float]] = deque(maxlen=MAX_STEPS_SHOWN)
        """Metrics of recent steps, each with the time at which the step ended."""
        self._began: tuple[StepPlan, float, int, int] | None = None
        self.num_snapshots = 0

    def due_in(self, now_s: float) -> float:
        """Seconds until there is something to draw."""
        return 0.0 if self._pool or self._tree else max(0.0, self._due_s - now_s)

    def began(self, plan: StepPlan, clock: MonotonicClock) -> None:
        """Record the start of a planned step, after drawing a little."""
        self.work(clock)
        num_prompt = sum(
            max(0, min(item.first_position + len(item.token_ids), one.num_prompt_tokens) - item.first_position)
            for item, one in zip(plan.items, self._scheduler.planned, strict=True)
        )
        self._began = plan, clock(), num_prompt, self._scheduler.stats.num_output_tokens

    def ended(self, now_s: float) -> None:
        """Record the end of the step, after its result was applied."""
        if self._began is None:
            return
        plan, began_s, num_prompt, num_output = self._began
        self._began = None
        num_output = self._scheduler.stats.num_output_tokens - num_output
        ms = round(1000 * (now_s - began_s), 3)
        self._steps.append((StepFigures(plan.step, 0.0, num_prompt, num_output, len(plan.items), ms), now_s))

    def work(self, clock: MonotonicClock) -> None:
        """Draw the next pieces if a snapshot is due, and show the snapshot when it is complete."""
        now_s = clock()
        since_s = 0.0 if self._last_work_s is None else min(now_s - self._last_work_s, MAX_STEP_S)
        self._last_work_s = now_s
        if self._pool is None and self._tree is None and now_s < self._due_s:
            return
        until_s = now_s + max(WORK_S, WORK_SHARE * since_s)
        self._draw_pool(until_s, clock)
        self._draw_tree(until_s, clock)

    def _draw_pool(self, until_s: float, clock: MonotonicClock) -> None:
        began_s = clock()
        if self._pool is None:
            if began_s < self._due_s:
                return
            memory = self._memory
            drawing = PoolDrawing(memory.pool, memory.pins, memory.tables.values(), memory.config.block_size)
            self._pool, self._pool_s = (drawing, drawing.pieces()), 0.0
            self._due_s = began_s + self._period_s
        is_drawn = _drawn_by(self._pool[1], until_s, clock)
        if is_drawn:
            drawing, self._pool = self._pool[0], None
            self.num_snapshots += 1
            self._show(self._snapshot(drawing, clock()))
        now_s = clock()
        self._pool_s += now_s - began_s
        if is_drawn and self._memory.config.num_blocks > PIECE_BLOCKS:
            self._due_s = max(self._due_s, now_s + self._pool_s / POOL_SHARE)

    def _draw_tree(self, until_s: float, clock: MonotonicClock) -> None:
        began_s = clock()
        if self._tree is None:
            if began_s < self._tree_due_s:
                return
            drawing = TreeDrawing(self._memory.tree, self._memory.pool)
            self._tree, self._tree_s = (drawing, drawing.pieces()), 0.0
        is_drawn = _drawn_by(self._tree[1], until_s, clock)
        if is_drawn:
            self._tree_drawn, self._tree = self._tree[0].drawn(), None
        now_s = clock()
        self._tree_s += now_s - began_s
        self._tree_due_s = now_s + min(self._tree_s / TREE_SHARE, MAX_TREE_AGE_S)

    def _snapshot(self, drawing: PoolDrawing, now_s: float) -> EngineSnapshot:
        steps = tuple(
            StepFigures(one.step, round(now_s - at_s, 4), one.prompt_tokens, one.output_tokens, one.rows, one.ms)
            for one, at_s in self._steps
        )
        self._steps.clear()
        running = tuple(map(_running, self._scheduler.running[:MAX_RUNNING_SHOWN]))
        return EngineSnapshot(drawing.drawn(), self._tree_drawn, steps, running)


def _drawn_by(pieces: Iterator[None], until_s: float, clock: MonotonicClock) -> bool:
    """Draw at least one piece, and more until `until_s`; return whether all pieces are drawn."""
    return all(clock() < until_s for _ in pieces)


def _running(one: Sequence) -> RunningFigures:
    request, num_output = one.request, one.num_output_tokens
    computed = 0 if one.table is None else one.table.num_computed
    return RunningFigures(
        request.request_id,
        request.tenant,
        request.priority.value,
        "prompt" if computed < one.num_prompt_tokens else "answer",
        computed,
        len(one.tokens),
        one.num_prompt_tokens,
        one.num_cached_tokens,
        num_output,
    )
