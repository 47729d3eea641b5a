"""One forward pass of transformers' modules over all rows of a plan."""

import torch

from quire.backends.host.batch import make_batch
from quire.backends.host.runner_base import RunnerBase
from quire.backends.host.wanted import Computed, Wanted
from quire.backends.torch.adapter import Adapter
from quire.backends.torch.kv_store import KVStore
from quire.core.step import StepPlan


class TorchRunner(RunnerBase[Adapter, KVStore]):
    """On any device of torch's."""

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[Wanted, Computed] | None:
        model, store = self._opened()
        store.copy(plan.copies)
        if not plan.items:
            return None
        batch = make_batch(plan.items, store.block_size, model.padded)
        wanted = Wanted(plan.items, batch)
        return wanted, model.compute(batch, store, wanted.rows)
