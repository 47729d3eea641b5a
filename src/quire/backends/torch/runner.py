"""One forward pass of transformers' modules over all rows of a plan."""

import torch

from quire.backends.host.batch import make_batch
from quire.backends.host.runner_base import RunnerBase
from quire.backends.host.wanted import PassOutputs, RequestedRows
from quire.backends.torch.adapter import Adapter
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import padded
from quire.core.step import StepPlan


class TorchRunner(RunnerBase[Adapter, KVStore]):
    """Runs steps on any torch device."""

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[RequestedRows, PassOutputs] | None:
        model, store = self._opened()
        store.copy(plan.copies)
        if not plan.items:
            return None
        batch = make_batch(plan.items, store.block_size, padded)
        requested = RequestedRows(plan.items, batch)
        return requested, model.compute(batch, store, requested.rows)
