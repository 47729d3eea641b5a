"""Runs a plan in one forward pass over all rows; copies recurrent states before and after the pass."""

from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.kv_store import KVStore
from quire.backends.cpu.state_store import StateStore
from quire.backends.host.batch import make_batch
from quire.backends.host.runner_base import RunnerBase
from quire.backends.host.wanted import PassOutputs, RequestedRows
from quire.backends.protocol import Capacity
from quire.core.step import StepPlan


class CpuRunner(RunnerBase[Decoder, KVStore]):
    """Runs steps on the CPU with quire's kernels."""

    def __init__(self, model: Decoder, store: KVStore, capacity: Capacity, states: StateStore | None = None) -> None:
        super().__init__(model, store, capacity)
        self._states = states
        """Recurrent states; None for a model without recurrent layers."""

    def count_layers(self, counter: memoryview) -> int:
        """See `protocol.CountsLayers`; the kernels count during the native call."""
        return self._opened()[0].count_layers(counter)

    def close(self) -> None:
        super().close()
        self._states = None

    def _compute(self, plan: StepPlan) -> tuple[RequestedRows, PassOutputs] | None:
        model, store = self._opened()
        store.copy(plan.copies)
        states = self._states
        if states is not None:
            states.copy(plan.slot_copies)
        if not plan.items:
            return None
        batch = make_batch(plan.items, store.block_size)
        requested = RequestedRows(plan.items, batch)
        needed_rows = requested.needed_rows(len(batch.tokens))
        outputs = model.compute(batch, store, requested.rows, requested.num_sampled, needed_rows, states)
        if states is not None:
            states.copy(plan.cache_copies)
        return requested, outputs
