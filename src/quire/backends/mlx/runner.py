"""One forward pass of mlx-lm's modules over all rows of a plan.

MLX evaluates lazily. `start` builds the step and begins its evaluation; `wait` fetches the outputs and chooses tokens,
so masks can be computed in between. One thread makes all calls to MLX, whose arrays and streams belong to a thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from quire.backends.host.batch import make_batch
from quire.backends.host.runner_base import RunnerBase, Step
from quire.backends.host.wanted import PassOutputs, RequestedRows
from quire.backends.mlx.decoder import Decoder, LazyOutputs
from quire.backends.mlx.kv_store import KVStore
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import Masks, StepPlan, StepResult

_Result = TypeVar("_Result")


class MlxThread:
    """The thread that makes all calls to MLX."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "mlx")

    def submit(self, function: Callable[[], _Result]) -> "Future[_Result]":
        """Submit a function; it runs after all functions submitted earlier."""
        return self._executor.submit(function)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function on the thread and wait for its result."""
        return self._executor.submit(function).result()

    def close(self) -> None:
        """Stop the thread after all submitted functions."""
        self._executor.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A step whose evaluation has begun."""

    requested: RequestedRows
    outputs: LazyOutputs
    with_hidden: bool


class MlxRunner(RunnerBase[Decoder, KVStore]):
    """Runs steps on MLX's default device."""

    def __init__(self, mlx_thread: MlxThread, model: Decoder, store: KVStore, capacity: Capacity) -> None:
        super().__init__(model, store, capacity)
        self._mlx_thread = mlx_thread

    def start(self, plan: StepPlan) -> PendingStep:
        """Build the step and begin its evaluation on the MLX thread."""
        self._check_size(plan)
        return Step(partial(self._finish, plan, self._mlx_thread.submit(lambda: self._begin(plan))))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._mlx_thread.call(lambda: self._opened()[1].read_blocks(block_ids))

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._mlx_thread.call(lambda: self._opened()[1].write_blocks(block_ids, data))

    def _compute(self, plan: StepPlan) -> tuple[RequestedRows, PassOutputs] | None:
        return self._fetch(self._mlx_thread.submit(lambda: self._begin(plan)))

    def _finish(self, plan: StepPlan, future: "Future[_StartedStep | None]", masks: Masks) -> StepResult:
        return self._result(plan, self._fetch(future), masks)

    def _fetch(self, future: "Future[_StartedStep | None]") -> tuple[RequestedRows, PassOutputs] | None:
        step = future.result()
        if step is None:
            return None
        return step.requested, self._mlx_thread.call(lambda: step.outputs.wait(with_hidden=step.with_hidden))

    def _begin(self, plan: StepPlan) -> _StartedStep | None:
        model, store = self._opened()
        store.copy(plan.copies)
        if not plan.items:
            mx.eval(store.arrays)
            return None
        batch = make_batch(plan.items, store.block_size)
        requested = RequestedRows(plan.items, batch)
        outputs = model.compute(batch, store, requested.rows)
        # The store too: otherwise unread writes stay lazy, and each step would depend on all earlier steps.
        mx.async_eval(outputs.are_finite, outputs.hidden, outputs.logits, store.arrays)  # type: ignore[no-untyped-call]
        return _StartedStep(requested, outputs, any(item.hidden_positions for item in plan.items))
