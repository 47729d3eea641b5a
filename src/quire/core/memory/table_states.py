"""What happens to a table's recurrent state while the verbs of the memory change its blocks.

Called by `KVMemory` alone, and only for models with recurrent layers: `state_slots` has slots and blocks, this module
decides which of them a table needs.
"""

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable
from quire.core.memory.state_slots import StateCheckpoint, StateSlots
from quire.errors import InvariantError, PinBudgetError


class TableStates:
    """The slots of one memory, as its tables use them."""

    __slots__ = ("_pin_share", "_pool", "slots")

    def __init__(self, slots: StateSlots, pool: BlockPool, pin_share: float) -> None:
        self.slots = slots
        self._pool = pool
        self._pin_share = pin_share

    def usable(self, table: BlockTable, found: list[int]) -> list[int]:
        """Of the named blocks that follow, those up to the deepest that carries a state."""
        table.num_matched = len(table.blocks) + len(found)
        return found[: self.slots.num_usable(found)]

    def match(self, table: BlockTable) -> None:
        """The table has just been extended by blocks of which the last carries a state."""
        table.state_slot = self.slots.begin_after(table.blocks[-1], table.state_slot)

    def reserve(self, table: BlockTable, keep: StateCheckpoint | None) -> None:
        """A running slot if the table has none, and one for the state to keep."""
        if table.state_slot is None:
            table.state_slot = self.slots.begin(None)
        if keep is not None and table.is_naming:
            table.keep = keep
            table.promised_slot = self.slots.promise(table.state_slot, table.last_kept)

    def commit(self, table: BlockTable, *, is_whole: bool) -> bool:
        """Keep the promised state if it is true, and return so; where the row is not, go back to the last one kept."""
        slot, table.promised_slot = table.promised_slot, None
        is_kept = False
        if slot is not None:
            is_kept = is_whole and bool(self._pool.named[table.blocks[-1]])
            if is_kept:
                table.last_kept = table.blocks[-1]
                self.slots.attach(table.last_kept, slot, table.keep)
            else:
                self.slots.break_promise(slot)
        if not is_whole:
            self._go_back(table)
        return is_kept

    def _go_back(self, table: BlockTable) -> None:
        """To the deepest block that carries a state: the table has computed that far and no further."""
        slots, running = self.slots, table.state_slot
        num_kept = slots.num_usable(table.blocks)
        behind = table.blocks[num_kept:]
        del table.blocks[num_kept:]
        self._pool.release(reversed(behind))
        if table.last_kept in behind:
            table.last_kept = None  # another table's block from now on, and what it carries
        table.num_computed = table.num_reserved = num_kept * table.block_size
        table.is_naming = True
        table.state_slot = slots.begin_after(table.blocks[-1], running) if num_kept else slots.begin(running)

    def fork(self, table: BlockTable, child: BlockTable) -> None:
        """A second table over all that this one has computed."""
        if table.state_slot is None:
            raise InvariantError(f"fork: table {table.table_id} has computed {table.num_computed} tokens and no state")
        child.state_slot = self.slots.fork(table.state_slot)

    def release(self, table: BlockTable) -> None:
        """The table is over; one that has computed nothing, or a pin, has no slot."""
        if table.state_slot is not None:
            self.slots.give_back(table.state_slot)
            table.state_slot = None

    def check_pin(self, block: int) -> None:
        """Refuse a pin for which there is no slot to spare."""
        if not self.slots.may_pin(block, self._pin_share):
            raise PinBudgetError(
                f"expected at most {self._pin_share:.0%} of the state slots that no running sequence needs to be "
                f"pinned, {self.slots.num_pinned} are pinned; unpin something, or raise pin_share",
                code="too_many_pinned_states",
            )
