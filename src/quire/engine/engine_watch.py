"""Makes an engine's snapshots while it is watched: before each step is run, and while the engine is idle.

Without a watcher, `Engine.watch` is None and a step has no extra cost. Maps (of the pool and of the prefix tree) are
drawn in pieces, a few at each step, so that no step waits long. The tree, the most expensive map, is drawn less often.
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
"""Longest time that a step waits for drawing, as a fraction of the previous step's duration."""
MAX_STEP_S = 1.0
"""Cap on the assumed duration of the previous step, because the time between two calls includes idle time."""
POOL_SHARE = 0.01
"""Maximum fraction of time spent on drawing large pools; snapshots become less frequent to stay below it."""
TREE_SHARE = 0.005  # maximum fraction of time spent on drawing the tree
MAX_TREE_AGE_S = 30.0  # a tree is drawn at least this often, beyond TREE_SHARE

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
        self._last_tree = TreePicture()
        self._steps: deque[tuple[StepFigures, float]] = deque(maxlen=MAX_STEPS_SHOWN)
        """Metrics of recent steps, each with the time at which the step ended."""
        self._step_start: tuple[StepPlan, float, int, int] | None = None
        self.num_snapshots = 0

    def seconds_until_due(self, now_s: float) -> float:
        """Return the seconds until there is something to draw."""
        return 0.0 if self._pool or self._tree else max(0.0, self._due_s - now_s)

    def start_step(self, plan: StepPlan, clock: MonotonicClock) -> None:
        """Draw for a short time, then record the start of a planned step."""
        self.work(clock)
        num_prompt = sum(
            max(0, min(item.first_position + len(item.token_ids), sequence.num_prompt_tokens) - item.first_position)
            for item, sequence in zip(plan.items, self._scheduler.planned, strict=True)
        )
        self._step_start = plan, clock(), num_prompt, self._scheduler.stats.num_output_tokens

    def end_step(self, now_s: float) -> None:
        """Record the end of the step, after its result was applied."""
        if self._step_start is None:
            return
        plan, start_s, num_prompt, num_output = self._step_start
        self._step_start = None
        num_output = self._scheduler.stats.num_output_tokens - num_output
        ms = round(1000 * (now_s - start_s), 3)
        self._steps.append((StepFigures(plan.step, 0.0, num_prompt, num_output, len(plan.items), ms), now_s))

    def work(self, clock: MonotonicClock) -> None:
        """Draw the next pieces of the maps, if any are due; show a snapshot once the pool map is complete."""
        now_s = clock()
        step_s = 0.0 if self._last_work_s is None else min(now_s - self._last_work_s, MAX_STEP_S)
        self._last_work_s = now_s
        if self._pool is None and self._tree is None and now_s < self._due_s:
            return
        deadline_s = now_s + max(WORK_S, WORK_SHARE * step_s)
        self._draw_pool(deadline_s, clock)
        self._draw_tree(deadline_s, clock)

    def _draw_pool(self, deadline_s: float, clock: MonotonicClock) -> None:
        start_s = clock()
        if self._pool is None:
            if start_s < self._due_s:
                return
            memory = self._memory
            drawing = PoolDrawing(memory.pool, memory.pins, memory.tables.values(), memory.config.block_size)
            self._pool, self._pool_s = (drawing, drawing.pieces()), 0.0
            self._due_s = start_s + self._period_s
        is_drawn = _draw_until(self._pool[1], deadline_s, clock)
        if is_drawn:
            drawing, self._pool = self._pool[0], None
            self.num_snapshots += 1
            self._show(self._snapshot(drawing, clock()))
        now_s = clock()
        self._pool_s += now_s - start_s
        if is_drawn and self._memory.config.num_blocks > PIECE_BLOCKS:
            self._due_s = max(self._due_s, now_s + self._pool_s / POOL_SHARE)

    def _draw_tree(self, deadline_s: float, clock: MonotonicClock) -> None:
        start_s = clock()
        if self._tree is None:
            if start_s < self._tree_due_s:
                return
            drawing = TreeDrawing(self._memory.tree, self._memory.pool)
            self._tree, self._tree_s = (drawing, drawing.pieces()), 0.0
        is_drawn = _draw_until(self._tree[1], deadline_s, clock)
        if is_drawn:
            self._last_tree, self._tree = self._tree[0].result(), None
        now_s = clock()
        self._tree_s += now_s - start_s
        self._tree_due_s = now_s + min(self._tree_s / TREE_SHARE, MAX_TREE_AGE_S)

    def _snapshot(self, drawing: PoolDrawing, now_s: float) -> EngineSnapshot:
        steps = tuple(
            StepFigures(step.step, round(now_s - end_s, 4), step.prompt_tokens, step.output_tokens, step.rows, step.ms)
            for step, end_s in self._steps
        )
        self._steps.clear()
        running = tuple(map(_running_figures, self._scheduler.running[:MAX_RUNNING_SHOWN]))
        return EngineSnapshot(drawing.result(), self._last_tree, steps, running)


def _draw_until(pieces: Iterator[None], deadline_s: float, clock: MonotonicClock) -> bool:
    """Draw at least one piece, and more until `deadline_s`; return whether all pieces are drawn."""
    return all(clock() < deadline_s for _ in pieces)


def _running_figures(sequence: Sequence) -> RunningFigures:
    request, num_output = sequence.request, sequence.num_output_tokens
    num_computed = 0 if sequence.table is None else sequence.table.num_computed
    return RunningFigures(
        request.request_id,
        request.tenant,
        request.priority.value,
        "prompt" if num_computed < sequence.num_prompt_tokens else "answer",
        num_computed,
        len(sequence.tokens),
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        num_output,
    )
