"""Slots for recurrent state, the second resource of the KV memory; only for models with recurrent layers.

A slot contains the recurrent state of one sequence after one of its tokens, for all recurrent layers. Slot 0 contains
the state before the first token and is never written. Every other slot is:

    blank       without useful content
    running     belongs to a block table: the state after its last computed token
    reserved    receives a copy of a state after the step in flight, to be cached
    cached      belongs to a block in the prefix tree: the state after the block's last token

Cached slots are evicted in least-recently-used order, except those of pinned blocks, which are kept separately. The
copies that a runner must make are recorded here in order and become part of the next `StepPlan`:

    copies ─► the items of the step ─► cache copies

The copies are made first, in the order in which they were requested; the copies of states to be cached are made when
all items are done. So a slot can be reassigned while a copy from it is still pending.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from quire.core.step import SlotCopy
from quire.errors import InvariantError

ZERO_SLOT = 0


class StateCheckpoint(Enum):
    """Why the state at the end of a step (on a block border) is cached, and for how long."""

    TRANSIENT = "transient"
    """The newest state of a sequence, replaced by the sequence's next state unless another sequence used it before."""
    SPARSE = "sparse"
    """One of a few states within a long prompt, for other prompts with the same beginning. Evicted first."""
    DURABLE = "durable"
    """The state at the end of a prompt, or at a position where prompts are known to diverge."""


class StateSlots:
    """Allocates slots 1 to `num_slots`, and decides which cached state is evicted next. `num_slots` is 0 for models
    without recurrent layers."""

    def __init__(self, num_slots: int, num_running: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        """Number of cached states that were evicted."""
        self.blank_slots = list(range(num_slots, 0, -1))
        self.cached_slots: OrderedDict[int, int] = OrderedDict()
        """Block -> slot, least recently used first; for blocks that are not pinned."""
        self.pinned_slots: dict[int, int] = {}
        """Block -> slot, for pinned blocks; never evicted."""
        self.transients: set[int] = set()
        """Blocks with a `TRANSIENT` state that no sequence has used."""
        self.num_reserved = 0
        """Number of reserved slots."""
        self._max_fixed = num_slots - num_running
        """Maximum number of reserved and pinned slots; the other slots are reserved for running sequences."""
        self._copies: list[SlotCopy] = []
        self._cache_copies: list[SlotCopy] = []

    @property
    def num_cached(self) -> int:
        """Number of slots that belong to blocks."""
        return len(self.cached_slots) + len(self.pinned_slots)

    def cached(self) -> dict[int, int]:
        """Return block -> slot in eviction order, pinned blocks last. For checks and visualization."""
        return {**self.cached_slots, **self.pinned_slots}

    def slot_of(self, block: int) -> int | None:
        """Return the slot with the cached state after this block, or None."""
        slot = self.cached_slots.get(block)
        return self.pinned_slots.get(block) if slot is None else slot

    def num_usable(self, blocks: Sequence[int]) -> int:
        """Return how many of these consecutive blocks can be hit: those up to the last one with a cached state."""
        for count in range(len(blocks), 0, -1):
            if self.slot_of(blocks[count - 1]) is not None:
                return count
        return 0

    # -- a sequence's own slot -----------------------------------------------------------------------------------------

    def begin(self, slot: int | None) -> int:
        """Return a running slot with the initial state: `slot` if it is not None, else a new slot."""
        slot = self._take() if slot is None else slot
        self._copies.append(SlotCopy(ZERO_SLOT, slot))
        return slot

    def begin_after(self, block: int, slot: int | None) -> int:
        """Return a running slot with the cached state after `block`: `slot` if it is not None, else a new slot."""
        source = self.use(block)
        slot = self._take() if slot is None else slot
        if source != slot:  # equal if `_take` had to evict this state, because no other was left
            self._copies.append(SlotCopy(source, slot))
        return slot

    def fork(self, slot: int) -> int:
        """Return a running slot for a second sequence. Before the next step, `slot` is copied into it."""
        child = self._take()
        self._copies.append(SlotCopy(slot, child))
        return child

    def give_back(self, slot: int) -> None:
        """Free a table's running slot. Pending copies into it are harmless."""
        self.blank_slots.append(slot)

    # -- cached states -------------------------------------------------------------------------------------------------

    def reserve(self, running_slot: int, last_cached_block: int | None) -> int | None:
        """Reserve a slot into which the running slot is copied after the step; None if no slot is available.

        `last_cached_block` is the block whose state the sequence cached last. If it is transient, its slot is reused.
        """
        if self.num_reserved + len(self.pinned_slots) >= self._max_fixed:
            return None
        if last_cached_block is not None and last_cached_block in self.transients:
            reserved_slot = self.cached_slots.pop(last_cached_block)
            self.transients.discard(last_cached_block)
        else:
            reserved_slot = self._take()
        self.num_reserved += 1
        self._cache_copies.append(SlotCopy(running_slot, reserved_slot))
        return reserved_slot

    def attach(self, block: int, slot: int, kind: StateCheckpoint) -> None:
        """After a successful step, assign the reserved slot to this block of the prefix tree. If the block
        already has an equal state, the reserved slot is freed instead.
        """
        if self.slot_of(block) is not None:
            self.use(block)
            self.free_reserved(slot)
            return
        self.num_reserved -= 1
        self.cached_slots[block] = slot
        if kind is StateCheckpoint.TRANSIENT:
            self.transients.add(block)
        elif kind is StateCheckpoint.SPARSE:
            self.cached_slots.move_to_end(block, last=False)

    def free_reserved(self, slot: int) -> None:
        """Free a reserved slot, because the row failed or its block is not in the prefix tree."""
        self.num_reserved -= 1
        self.blank_slots.append(slot)

    def use(self, block: int) -> int:
        """Return the slot of a block with a cached state; mark it as most recently used and no longer transient."""
        self.transients.discard(block)
        if block in self.pinned_slots:
            return self.pinned_slots[block]
        self.cached_slots.move_to_end(block)
        return self.cached_slots[block]

    def forget(self, blocks: Iterable[int]) -> None:
        """Free the states of blocks that were removed from the prefix tree."""
        for block in blocks:
            slot = self.cached_slots.pop(block, None)
            if slot is not None:
                self.transients.discard(block)
                self.blank_slots.append(slot)
            elif block in self.pinned_slots:
                raise InvariantError(f"forget: expected an unpinned block, got {block}")

    def clear(self) -> None:
        """Free all cached states."""
        self.blank_slots += [*self.cached_slots.values(), *self.pinned_slots.values()]
        self.cached_slots, self.pinned_slots, self.transients = OrderedDict(), {}, set()

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin_state(self, block: int) -> None:
        """Protect the state of this block, if the block has one, until `unpin_states`."""
        if block in self.cached_slots:
            self.pinned_slots[block] = self.cached_slots.pop(block)
            self.transients.discard(block)

    def unpin_states(self, blocks: Iterable[int]) -> None:
        """Make the states of these blocks evictable again, as most recently used."""
        for block in blocks:
            if block in self.pinned_slots:
                self.cached_slots[block] = self.pinned_slots.pop(block)

    def may_pin(self, block: int, share: float) -> bool:
        """Whether this block's state may be pinned: at most `share` of the slots beyond `num_running` may be pinned."""
        return block in self.pinned_slots or (
            len(self.pinned_slots) + 1 <= share * self._max_fixed
            and len(self.pinned_slots) + self.num_reserved < self._max_fixed
        )

    # -- copies for the runner -----------------------------------------------------------------------------------------

    def pop_copies(self) -> tuple[tuple[SlotCopy, ...], tuple[SlotCopy, ...]]:
        """Return and clear the copies to make before the next step and those to make after it (states to be cached)."""
        copies, cache_copies = tuple(self._copies), tuple(self._cache_copies)
        self._copies, self._cache_copies = [], []
        return copies, cache_copies

    def _take(self) -> int:
        if self.blank_slots:
            return self.blank_slots.pop()
        if not self.cached_slots:
            raise InvariantError(f"all {self.num_slots} state slots are in use: too many sequences run")
        block, slot = self.cached_slots.popitem(last=False)
        self.transients.discard(block)
        self.num_evictions += 1
        return slot
