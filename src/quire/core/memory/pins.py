"""Pins, which protect cached prefixes from eviction for a limited time, within a budget of blocks.

A pin is a block table that no sequence writes to. It references its blocks like any other table, so no other code
needs special cases for pinned blocks. This module enforces the budget and stores when each pin expires.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.core.memory.block_table import BlockTable
from quire.errors import PinBudgetError

UNPIN_BLOCKS_AT_ONCE = 4096  # per call of `Pins.take_expired`


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that stays cached until a given time, whether it is used or not."""

    pin_id: int
    num_tokens: int
    """Number of pinned tokens: the cached whole blocks of the prefix, possibly 0."""
    expires_s: float


class Pins:
    """The block tables of all pins. A block with several pins counts once."""

    def __init__(self, num_blocks: int, budget_blocks: int, max_pins: int) -> None:
        self.budget_blocks = budget_blocks
        self.max_pins = max_pins
        self.num_pinned_blocks = 0
        self.tables: dict[int, BlockTable] = {}
        self.pin_count = array("i", bytes(4 * (num_blocks + 1)))
        self._expiries: list[tuple[float, int]] = []

    def add(self, table: BlockTable, expires_s: float) -> None:
        """Add a pin's table. Raises PinBudgetError if a limit is exceeded; then the caller must release the table."""
        num_new = sum(self.pin_count[block] == 0 for block in table.blocks)
        if len(self.tables) >= self.max_pins:
            raise PinBudgetError(f"expected at most {self.max_pins} pins; end a pin first", code="too_many_pins")
        if self.num_pinned_blocks + num_new > self.budget_blocks:
            raise PinBudgetError(
                f"expected at most {self.budget_blocks} pinned blocks, got {self.num_pinned_blocks} and "
                f"{num_new} more for this pin; end a pin first, or raise pin_share"
            )
        for block in table.blocks:
            self.pin_count[block] += 1
        self.num_pinned_blocks += num_new
        self.tables[table.table_id] = table
        heappush(self._expiries, (expires_s, table.table_id))

    def drop(self, pin_id: int) -> BlockTable | None:
        """Remove a pin and return its table, which the caller releases; None if the pin has already ended."""
        table = self.tables.pop(pin_id, None)
        if table is None:
            return None
        self._uncount(table.blocks)
        if len(self._expiries) > 2 * len(self.tables) + 64:
            # Pins that were ended early leave stale entries in the heap; remove these once they are the majority.
            self._expiries = [entry for entry in self._expiries if entry[1] in self.tables]
            heapify(self._expiries)
        return table

    def take_expired(self, now_s: float) -> Iterator[tuple[BlockTable, list[int]]]:
        """Yield the tables of expired pins, each with the blocks that the caller must release, last block first.

        A call yields at most `UNPIN_BLOCKS_AT_ONCE` blocks, so that no step is delayed for long; a long pin is released
        from its tail over several calls. A pin has ended when its table is empty.
        """
        num_left = UNPIN_BLOCKS_AT_ONCE
        while self._expiries and self._expiries[0][0] <= now_s and num_left > 0:
            table = self.tables.get(self._expiries[0][1])
            if table is None:
                heappop(self._expiries)
                continue
            blocks = table.blocks[-num_left:]
            del table.blocks[-num_left:]
            table.num_computed = table.num_reserved = len(table.blocks) * table.block_size
            self._uncount(blocks)
            num_left -= len(blocks)
            if not table.blocks:
                heappop(self._expiries)
                del self.tables[table.table_id]
            yield table, blocks[::-1]

    def drop_all(self) -> list[BlockTable]:
        """Remove all pins and return their tables."""
        tables = list(self.tables.values())
        self.tables, self._expiries = {}, []
        for table in tables:
            for block in table.blocks:
                self.pin_count[block] = 0
        self.num_pinned_blocks = 0
        return tables

    def select_unpinned(self, blocks: list[int]) -> list[int]:
        """Return those of these blocks that are in no pin any more."""
        return [block for block in blocks if not self.pin_count[block]]

    def _uncount(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pin_count[block] -= 1
            self.num_pinned_blocks -= self.pin_count[block] == 0
