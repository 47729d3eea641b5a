"""One forward pass of mlx-lm's modules over all rows of a plan.

MLX evaluates lazily. `start` builds the step and begins its evaluation; `wait` fetches the outputs and chooses tokens,
so masks can be computed in between. A single thread owns MLX, because MLX's arrays and streams belong to a thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from quire.backends.host.batch import make_batch
from quire.backends.host.runner_base import RunnerBase, Step
from quire.backends.host.wanted import Computed, Wanted
from quire.backends.mlx.decoder import Computing, Decoder
from quire.backends.mlx.kv_store import KVStore
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import Masks, StepPlan, StepResult

_Result = TypeVar("_Result")


class Owner:
    """The single thread that calls MLX."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mlx")

    def set_going(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Submit work; it runs after all work submitted earlier."""
        return self._thread.submit(work)

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Run work on the thread and wait for its result."""
        return self._thread.submit(work).result()

    def end(self) -> None:
        """Stop the thread after all submitted work."""
        self._thread.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose evaluation has begun."""

    wanted: Wanted
    computing: Computing
    with_hidden: bool


class MlxRunner(RunnerBase[Decoder, KVStore]):
    """Runs steps on MLX's default device."""

    def __init__(self, owner: Owner, model: Decoder, store: KVStore, capacity: Capacity) -> None:
        super().__init__(model, store, capacity)
        self._owner = owner

    def start(self, plan: StepPlan) -> PendingStep:
        """Build the step and begin its evaluation on the thread that owns MLX."""
        self._check_size(plan)
        return Step(partial(self._finish, plan, self._owner.set_going(lambda: self._begin(plan))))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._owner.call(lambda: self._opened()[1].read_blocks(block_ids))

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._owner.call(lambda: self._opened()[1].write_blocks(block_ids, data))

    def _compute(self, plan: StepPlan) -> tuple[Wanted, Computed] | None:
        return self._computed(self._owner.set_going(lambda: self._begin(plan)))

    def _finish(self, plan: StepPlan, begun: "Future[_Begun | None]", masks: Masks) -> StepResult:
        return self._result(plan, self._computed(begun), masks)

    def _computed(self, begun: "Future[_Begun | None]") -> tuple[Wanted, Computed] | None:
        going = begun.result()
        if going is None:
            return None
        return going.wanted, self._owner.call(lambda: going.computing.wait(with_hidden=going.with_hidden))

    def _begin(self, plan: StepPlan) -> _Begun | None:
        model, store = self._opened()
        store.copy(plan.copies)
        if not plan.items:
            mx.eval(store.arrays)
            return None
        batch = make_batch(plan.items, store.block_size)
        wanted = Wanted(plan.items, batch)
        computing = model.compute(batch, store, wanted.rows)
        # The store too: otherwise unread writes stay lazy, and each step would depend on all earlier ones.
        mx.async_eval(computing.are_finite, computing.hidden, computing.logits, store.arrays)  # type: ignore[no-untyped-call]
        return _Begun(wanted, computing, any(item.hidden_positions for item in plan.items))
