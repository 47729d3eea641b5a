"""What runners of all backends do alike: a plan in, a result out.

A runner holds the KV data between steps, and lists of tokens made ready for sampling (`token_lists`), which change no
result. Which blocks, which tokens, in which order: the plan says.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from quire.backends.host.token_lists import KeptLists
from quire.backends.host.wanted import Computed, Wanted
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.errors import InvariantError


class Store(Protocol):
    """The data of a pool of blocks."""

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """In the layout it documents."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back."""
        ...


ModelT = TypeVar("ModelT")
StoreT = TypeVar("StoreT", bound=Store)


class Step:
    """A step on its way, and what ends it."""

    def __init__(self, finish: Callable[[Masks], StepResult]) -> None:
        self._finish = finish

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        """See `protocol.PendingStep`."""
        return self._finish(masks)


class RunnerBase(ABC, Generic[ModelT, StoreT]):
    """Runs one model over one store of blocks."""

    def __init__(self, model: ModelT, store: StoreT, capacity: Capacity) -> None:
        self._model: ModelT | None = model
        self._store: StoreT | None = store
        self._capacity = capacity
        self._lists = KeptLists(capacity.vocabulary_size)

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Computed when it is waited for: on a CPU nothing runs beside it anyway."""
        return Step(partial(self.run, plan))

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        """A step from its beginning to its end."""
        self._check_size(plan)
        return self._result(plan, self._compute(plan), masks)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """In the layout `kv_store` documents."""
        return self._opened()[1].read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back."""
        self._opened()[1].write_blocks(block_ids, data)

    def close(self) -> None:
        """Give model and blocks back."""
        self._model = self._store = None

    @abstractmethod
    def _compute(self, plan: StepPlan) -> tuple[Wanted, Computed] | None:
        """Copies first, then every row at once, then the states to keep; None if the plan has no rows."""

    def _result(self, plan: StepPlan, computed: tuple[Wanted, Computed] | None, masks: Masks) -> StepResult:
        if computed is None:
            return StepResult(plan.step, {})
        wanted, numbers = computed
        return StepResult(plan.step, wanted.results(numbers, self._lists.of(plan.items), masks))

    def _check_size(self, plan: StepPlan) -> None:
        num_tokens, most = sum(len(item.token_ids) for item in plan.items), self._capacity.max_step_tokens
        if num_tokens > most:
            raise InvariantError(f"expected at most {most} tokens in a step, got {num_tokens}", code="step_too_large")

    def _opened(self) -> tuple[ModelT, StoreT]:
        if self._model is None or self._store is None:
            raise InvariantError("the runner is closed", code="runner_is_closed")
        return self._model, self._store
