"""Assigns state slots to block tables when `KVMemory` changes their blocks.

Only `KVMemory` calls this module, and only for models with recurrent layers. `state_slots` manages the slots; this
module decides which slots a table needs.
"""

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable
from quire.core.memory.state_slots import StateCheckpoint, StateSlots
from quire.errors import InvariantError


class TableStates:
    """The state slots of all block tables of one memory."""

    def __init__(self, slots: StateSlots, pool: BlockPool, pin_share: float) -> None:
        self.slots = slots
        self._pool = pool
        self._pin_share = pin_share

    def usable_blocks(self, table: BlockTable, blocks: list[int]) -> list[int]:
        """Return the usable ones of the cached blocks that continue the table: up to the last with a cached state."""
        table.num_matched = len(table.blocks) + len(blocks)
        return blocks[: self.slots.num_usable(blocks)]

    def match(self, table: BlockTable) -> None:
        """Load the state of the table's last block, after the table was extended by cached blocks."""
        table.state_slot = self.slots.begin_after(table.blocks[-1], table.state_slot)

    def reserve(self, table: BlockTable, keep: StateCheckpoint | None) -> None:
        """Allocate a running slot if the table has none; with `keep`, also reserve a slot for the state to cache."""
        if table.state_slot is None:
            table.state_slot = self.slots.begin(None)
        if keep is not None and table.is_naming:
            table.keep = keep
            table.reserved_slot = self.slots.reserve(table.state_slot, table.last_cached_block)

    def commit(self, table: BlockTable, *, is_whole: bool) -> bool:
        """Cache the reserved state if the row succeeded; otherwise roll back. Returns whether a state was cached."""
        slot, table.reserved_slot = table.reserved_slot, None
        is_cached = False
        if slot is not None:
            is_cached = is_whole and bool(self._pool.named[table.blocks[-1]])
            if is_cached:
                table.last_cached_block = table.blocks[-1]
                self.slots.attach(table.last_cached_block, slot, table.keep)
            else:
                self.slots.free_reserved(slot)
        if not is_whole:
            self._roll_back(table)
        return is_cached

    def _roll_back(self, table: BlockTable) -> None:
        """Roll the table back to its last block with a cached state, or to the start, and free the later blocks."""
        slots, slot = self.slots, table.state_slot
        num_usable = slots.num_usable(table.blocks)
        dropped_blocks = table.blocks[num_usable:]
        del table.blocks[num_usable:]
        self._pool.release(reversed(dropped_blocks))
        if table.last_cached_block in dropped_blocks:
            table.last_cached_block = None  # that block, and its state, may now belong to other tables
        table.num_computed = table.num_reserved = num_usable * table.block_size
        table.is_naming = True
        table.state_slot = slots.begin_after(table.blocks[-1], slot) if num_usable else slots.begin(slot)

    def fork(self, table: BlockTable, child: BlockTable) -> None:
        """Copy the state of a table to a new slot for the forked `child`."""
        if table.state_slot is None:
            raise InvariantError(f"fork: table {table.table_id} has {table.num_computed} computed tokens and no state")
        child.state_slot = self.slots.fork(table.state_slot)

    def release(self, table: BlockTable) -> None:
        """Free the table's running slot. Tables of pins, and tables without computed tokens, have none."""
        if table.state_slot is not None:
            self.slots.give_back(table.state_slot)
            table.state_slot = None

    def num_pinnable(self, blocks: list[int]) -> int:
        """Return how many of a pin's blocks are useful: those up to the last with a state, if that may be pinned."""
        num_usable = self.slots.num_usable(blocks)
        return num_usable if num_usable and self.slots.may_pin(blocks[num_usable - 1], self._pin_share) else 0
