"""What the runner needs of a model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.backends.torch.inputs import Attending, Batch
from quire.backends.torch.kv_store import KVStore


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward pass came to."""

    is_finite: torch.Tensor
    """[row]: whether the row's last hidden state is. If not, what it wrote must not be used."""
    logits: torch.Tensor
    """[wanted row, vocabulary], float32."""


class Model(Attending, Protocol):
    """Computes a batch's rows."""

    @property
    def vocabulary_size(self) -> int:
        """Rows of the head."""
        ...

    def compute(self, batch: Batch, store: KVStore, wanted: torch.Tensor) -> Computed:
        """Write the rows' KV, and return the logits of the wanted rows."""
        ...
