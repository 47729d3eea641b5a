"""The store of recurrent states: one row of floats per slot, in which every recurrent layer has its own range.

Slot 0 is the state before the first token: zeros that are never overwritten.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from quire.backends.host.batch import Batch
from quire.backends.kernels import large_pages
from quire.backends.kernels.arrays import Floats, Ids
from quire.core.step import SlotCopy
from quire.errors import InvariantError

FLOAT_BYTES = 4


class Runs(NamedTuple):
    """The rows of each sequence: its first row (`rows` ends with the number of all rows), and its state slot."""

    rows: Ids
    slots: Ids


@cache
def no_runs() -> Runs:
    """Return empty runs, for models without recurrent layers."""
    return Runs(np.zeros(1, np.int64), np.zeros(0, np.int64))


class StateStore:
    """The data of a pool of state slots; the core decides which slots are in use."""

    def __init__(self, slot_size: int, num_slots: int) -> None:
        self.num_slots = num_slots
        (memory,) = large_pages.allocate([(num_slots + 1) * slot_size * FLOAT_BYTES])
        self.numbers: Floats = memory.view(np.float32).reshape(num_slots + 1, slot_size)

    def copy(self, copies: Iterable[SlotCopy]) -> None:
        """Copy whole slots in order; a later copy may read the result of an earlier one."""
        for src, dst in copies:
            if not (0 <= src <= self.num_slots and 0 < dst <= self.num_slots):
                raise InvariantError(f"expected state slots from 1 to {self.num_slots}, got a copy from {src} to {dst}")
            self.numbers[dst] = self.numbers[src]

    def runs(self, batch: Batch) -> Runs:
        """Return each item's rows and its slot. Raises InvariantError unless the slots are valid and distinct."""
        slots = np.array([item.state_slot for item in batch.items], np.int64)
        if len(slots) and (slots.min() < 1 or slots.max() > self.num_slots or len(np.unique(slots)) < len(slots)):
            raise InvariantError(f"expected distinct state slots from 1 to {self.num_slots}, got {slots}")
        return Runs(np.array([*batch.first_rows, len(batch.tokens)], np.int64), slots)
