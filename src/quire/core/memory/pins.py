"""Which prefixes are kept although no sequence uses them, for how long, and how much of the pool that may take.

A pin is a block table that no sequence writes to: it holds its blocks like any other table, so pinned blocks need no
rule of their own anywhere else. This module only counts, against a budget, and remembers when each pin ends.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from quire.core.memory.block_table import BlockTable
from quire.errors import PinBudgetError

UNPIN_BLOCKS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix kept in memory until a moment, used or not."""

    pin_id: int
    num_tokens: int
    """How much of the prefix was cached and is now pinned: whole blocks, perhaps none."""
    expires_s: float


class Pins:
    """The tables that pins hold. A block pinned several times counts once."""

    def __init__(self, num_blocks: int, budget_blocks: int, max_pins: int) -> None:
        self.budget_blocks = budget_blocks
        self.max_pins = max_pins
        self.num_pinned_blocks = 0
        self.tables: dict[int, BlockTable] = {}
        self.pin_count = array("i", bytes(4 * (num_blocks + 1)))
        self._expiries: list[tuple[float, int]] = []

    def hold(self, table: BlockTable, expires_s: float) -> None:
        """Take the table in, or raise PinBudgetError and leave it to the caller."""
        num_fresh = sum(self.pin_count[block] == 0 for block in table.blocks)
        if len(self.tables) >= self.max_pins:
            raise PinBudgetError(f"all {self.max_pins} pins are in use; unpin something", code="too_many_pins")
        if self.num_pinned_blocks + num_fresh > self.budget_blocks:
            raise PinBudgetError(
                f"expected at most {self.budget_blocks} pinned blocks, {self.num_pinned_blocks} are pinned and this "
                f"pin would add {num_fresh}; unpin something, or raise pin_share"
            )
        for block in table.blocks:
            self.pin_count[block] += 1
        self.num_pinned_blocks += num_fresh
        self.tables[table.table_id] = table
        heappush(self._expiries, (expires_s, table.table_id))

    def drop(self, pin_id: int) -> BlockTable | None:
        """Give the table back to be released; None if that pin has ended already."""
        table = self.tables.pop(pin_id, None)
        if table is None:
            return None
        self._uncount(table.blocks)
        if len(self._expiries) > 2 * len(self.tables) + 64:
            # Pins ended by hand leave their expiry behind; sweep before those outnumber the living.
            self._expiries = [entry for entry in self._expiries if entry[1] in self.tables]
            heapify(self._expiries)
        return table

    def take_expired(self, now_s: float) -> Iterator[tuple[BlockTable, list[int]]]:
        """What pins whose time is over give back: table and blocks, last block first.

        About `UNPIN_BLOCKS_AT_ONCE` blocks a call, from the tail of a long pin if need be, so that no step waits for
        many. A table that comes empty has ended.
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
        """Every table, at once."""
        tables = list(self.tables.values())
        self.tables, self._expiries = {}, []
        for table in tables:
            for block in table.blocks:
                self.pin_count[block] = 0
        self.num_pinned_blocks = 0
        return tables

    def unpinned(self, blocks: list[int]) -> list[int]:
        """Those of these blocks that no pin holds."""
        return [block for block in blocks if not self.pin_count[block]]

    def _uncount(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pin_count[block] -= 1
            self.num_pinned_blocks -= self.pin_count[block] == 0
