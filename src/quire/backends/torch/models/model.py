"""What the runner needs of a model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.backends.torch.inputs import Batch
from quire.backends.torch.kv_store import KVStore, LayerShape


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward pass came to."""

    is_finite: torch.Tensor
    """[row]: whether the row's last hidden state is. If not, what it wrote must not be used."""
    hidden: torch.Tensor
    """[row, hidden size]: the last hidden states, as the head gets them."""
    logits: torch.Tensor
    """[wanted row, vocabulary], float32."""


class Model(Protocol):
    """Computes a batch's rows."""

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """What a token takes, layer by layer."""
        ...

    def padded(self, num_rows: int) -> int:
        """How many rows are computed for this many."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Rows of the head."""
        ...

    def compute(self, batch: Batch, store: KVStore, wanted: torch.Tensor) -> Computed:
        """Write the rows' KV, and return the last hidden states, and the logits of the wanted rows."""
        ...
