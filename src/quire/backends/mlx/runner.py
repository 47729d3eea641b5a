"""A plan in, a result out: copies, one forward pass over all rows, and for each row what it was wanted for.

MLX computes when it is asked to. `start` builds the step and sets it going, `wait` takes what came of it and chooses
tokens: masks are made meanwhile. One thread owns MLX, whatever thread calls: its arrays and streams belong to a thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from quire.backends.host.batch import make_batch
from quire.backends.host.token_lists import KeptLists
from quire.backends.host.wanted import Computed, Wanted
from quire.backends.mlx.decoder import Computing, Decoder
from quire.backends.mlx.kv_store import KVStore
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.errors import InvariantError

_Result = TypeVar("_Result")


class Owner:
    """The one thread that calls MLX."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mlx")

    def set_going(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Submit it, behind all earlier work."""
        return self._thread.submit(work)

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Wait for it."""
        return self._thread.submit(work).result()

    def end(self) -> None:
        """Take nothing more."""
        self._thread.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step on its way."""

    wanted: Wanted
    computing: Computing
    with_hidden: bool


class MlxRunner:
    """Runs one model over one store of blocks."""

    def __init__(self, owner: Owner, model: Decoder, store: KVStore, capacity: Capacity) -> None:
        self._owner = owner
        self._model: Decoder | None = model
        self._store: KVStore | None = store
        self._capacity = capacity
        self._lists = KeptLists(capacity.vocabulary_size)

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Built and set going by the thread that owns MLX."""
        num_tokens, most = sum(len(item.token_ids) for item in plan.items), self._capacity.max_step_tokens
        if num_tokens > most:
            raise InvariantError(f"expected at most {most} tokens in a step, got {num_tokens}", code="step_too_large")
        return _MlxStep(self, plan, self._owner.set_going(lambda: self._begin(plan)))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """In the layout `kv_store` documents."""
        return self._owner.call(lambda: self._opened()[1].read_blocks(block_ids))

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back."""
        self._owner.call(lambda: self._opened()[1].write_blocks(block_ids, data))

    def close(self) -> None:
        """Give model and blocks back."""
        self._model = self._store = None

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        """A step from its beginning to its end."""
        return self.start(plan).wait(masks)

    def finish(self, plan: StepPlan, begun: "Future[_Begun | None]", masks: Masks) -> StepResult:
        """What came of a step, and the tokens chosen by it."""
        going = begun.result()
        if going is None:
            return StepResult(plan.step, {})
        computed: Computed = self._owner.call(lambda: going.computing.wait(with_hidden=going.with_hidden))
        return StepResult(plan.step, going.wanted.results(computed, self._lists.of(plan.items), masks))

    def _begin(self, plan: StepPlan) -> _Begun | None:
        model, store = self._opened()
        store.copy(plan.copies)
        if not plan.items:
            mx.eval(store.arrays)
            return None
        batch = make_batch(plan.items, store.block_size)
        wanted = Wanted(plan.items, batch)
        computing = model.compute(batch, store, wanted.rows)
        # The store too: what is never read would be put off, and each step would stand on all before it.
        mx.async_eval(computing.are_finite, computing.hidden, computing.logits, store.arrays)  # type: ignore[no-untyped-call]
        return _Begun(wanted, computing, any(item.hidden_positions for item in plan.items))

    def _opened(self) -> tuple[Decoder, KVStore]:
        if self._model is None or self._store is None:
            raise InvariantError("the runner is closed", code="runner_is_closed")
        return self._model, self._store


class _MlxStep:
    def __init__(self, runner: MlxRunner, plan: StepPlan, begun: "Future[_Begun | None]") -> None:
        self._runner = runner
        self._plan = plan
        self._begun = begun

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self._runner.finish(self._plan, self._begun, masks)
