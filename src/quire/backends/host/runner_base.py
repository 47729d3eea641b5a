"""The base class of the runners of all tensor backends.

Between steps a runner stores the KV data, and token lists prepared for sampling (`token_lists`), which do not affect
results. The plan determines the blocks, the tokens and their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from quire.backends.host.block_store import BlockStore
from quire.backends.host.token_lists import TokenListCache
from quire.backends.host.wanted import PassOutputs, RequestedRows
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.errors import InvariantError

ModelT = TypeVar("ModelT")
StoreT = TypeVar("StoreT", bound=BlockStore[Any])


class Step:
    """A started step, and the function that completes it."""

    def __init__(self, finish: Callable[[Masks], StepResult]) -> None:
        self._finish = finish

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self._finish(masks)


class RunnerBase(ABC, Generic[ModelT, StoreT]):
    """Runs one model over one block store."""

    def __init__(self, model: ModelT, store: StoreT, capacity: Capacity) -> None:
        self._model: ModelT | None = model
        self._store: StoreT | None = store
        self.capacity = capacity
        self._lists = TokenListCache(capacity.vocabulary_size)

    def start(self, plan: StepPlan) -> PendingStep:
        """Return a step that computes in `wait`; on a CPU nothing would run concurrently anyway."""
        return Step(partial(self.run, plan))

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        """Run a complete step."""
        self._check_size(plan)
        return self._result(plan, self._compute(plan), masks)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._opened()[1].read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._opened()[1].write_blocks(block_ids, data)

    def close(self) -> None:
        self._model = self._store = None

    @abstractmethod
    def _compute(self, plan: StepPlan) -> tuple[RequestedRows, PassOutputs] | None:
        """Compute the copies, then all rows at once, then the states to keep; None if the plan has no rows."""

    def _result(self, plan: StepPlan, computed: tuple[RequestedRows, PassOutputs] | None, masks: Masks) -> StepResult:
        if computed is None:
            return StepResult(plan.step, {})
        requested, outputs = computed
        return StepResult(plan.step, requested.results(outputs, self._lists.lists_of(plan.items), masks))

    def _check_size(self, plan: StepPlan) -> None:
        num_tokens, limit = sum(len(item.token_ids) for item in plan.items), self.capacity.max_step_tokens
        if num_tokens > limit:
            raise InvariantError(f"expected at most {limit} tokens in a step, got {num_tokens}", code="step_too_large")

    def _opened(self) -> tuple[ModelT, StoreT]:
        if self._model is None or self._store is None:
            raise InvariantError("the runner is closed", code="runner_is_closed")
        return self._model, self._store
