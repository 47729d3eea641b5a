"""A plan in, a result out: copies, one forward pass over all rows, and for each row what it was wanted for.

Holds the KV data between steps, and lists of tokens made ready for sampling (`token_lists`), which change no result.
Which blocks, which tokens, in which order: the plan says.
"""

from collections.abc import Sequence

import torch

from quire.backends.host.batch import make_batch
from quire.backends.host.token_lists import KeptLists
from quire.backends.host.wanted import Wanted
from quire.backends.protocol import Capacity, PendingStep
from quire.backends.torch.adapter import Adapter
from quire.backends.torch.kv_store import KVStore
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.errors import InvariantError


class TorchRunner:
    """Runs one model over one store of blocks."""

    def __init__(self, model: Adapter, store: KVStore, capacity: Capacity) -> None:
        self._model: Adapter | None = model
        self._store: KVStore | None = store
        self._capacity = capacity
        self._lists = KeptLists(capacity.vocabulary_size)

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Computed when it is waited for: on a CPU nothing runs beside it anyway."""
        return _TorchStep(self, plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """In the layout `kv_store` documents."""
        return self._opened()[1].read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back."""
        self._opened()[1].write_blocks(block_ids, data)

    def close(self) -> None:
        """Give model and blocks back."""
        self._model = self._store = None

    @torch.inference_mode()
    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        """Copies first, then every row at once."""
        model, store = self._opened()
        num_tokens, most = sum(len(item.token_ids) for item in plan.items), self._capacity.max_step_tokens
        if num_tokens > most:
            raise InvariantError(f"expected at most {most} tokens in a step, got {num_tokens}", code="step_too_large")
        store.copy(plan.copies)
        if not plan.items:
            return StepResult(plan.step, {})
        batch = make_batch(plan.items, store.block_size, model.padded)
        wanted = Wanted(plan.items, batch)
        computed = model.compute(batch, store, wanted.rows)
        return StepResult(plan.step, wanted.results(computed, self._lists.of(plan.items), masks))

    def _opened(self) -> tuple[Adapter, KVStore]:
        if self._model is None or self._store is None:
            raise InvariantError("the runner is closed", code="runner_is_closed")
        return self._model, self._store


class _TorchStep:
    def __init__(self, runner: TorchRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self._runner.run(self._plan, masks)
