"""The second resource of the memory: slots for recurrent state, for models that have such layers.

A slot holds the state of all recurrent layers of one sequence after some token. Slot 0 is never written: it is the
state before the first token. Every other slot is in one of four states:

    blank       holds nothing of value
    running     a block table's own: the state after its last computed token
    promised    a step in flight will write a state into it, to be kept
    cached      a named block carries it: the state after that block's last token

Cached slots stand in a queue and are taken from its cold end; those of pinned blocks stand aside. What a runner is to
move is written down here in order and taken by the plan of the next step:

    copies ─► the items of the step ─► keeps

Copies are made in the order in which they were requested, before anything else; keeps when all items are done. That
order is what makes a slot safe to be handed on while a copy from it is still to be made.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from quire.core.step import SlotCopy
from quire.errors import InvariantError

ZERO_SLOT = 0


class StateCheckpoint(Enum):
    """What a state is kept for when a step ends on a block border."""

    TRANSIENT = "passing"
    """Its sequence's newest. Given up for the next one, unless it was used or the sequence has ended."""
    SPARSE = "sparse"
    """One of a few of a long prompt, in case others have the same beginning. The first to leave."""
    PINNED = "lasting"
    """The end of a prompt, or a place where prompts are known to part."""


class StateSlots:
    """Hands out slots 1 to `num_slots`, and decides which cached state leaves next. A pool of none is for models
    without recurrent layers."""

    __slots__ = (
        "_copies",
        "_keeps",
        "_max_fixed",
        "_num_promised",
        "blank_slots",
        "cached_slots",
        "num_evictions",
        "num_slots",
        "passing",
        "pinned_slots",
    )

    def __init__(self, num_slots: int, num_running: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        """Cached states that had to make room for others."""
        self.blank_slots = list(range(num_slots, 0, -1))
        self.cached_slots: OrderedDict[int, int] = OrderedDict()
        """Block -> slot, coldest first; without those of pinned blocks."""
        self.pinned_slots: dict[int, int] = {}
        self.passing: set[int] = set()
        """Blocks whose state was kept in passing and has not been used."""
        self._num_promised = 0
        self._max_fixed = num_slots - num_running
        """So many may be promised or pinned: the others are there for running sequences."""
        self._copies: list[SlotCopy] = []
        self._keeps: list[SlotCopy] = []

    @property
    def num_cached(self) -> int:
        """Slots that blocks carry."""
        return len(self.cached_slots) + len(self.pinned_slots)

    @property
    def num_pinned(self) -> int:
        """Of those, of pinned blocks."""
        return len(self.pinned_slots)

    @property
    def num_promised(self) -> int:
        """Slots that the step in flight, or being planned, writes a state to keep into."""
        return self._num_promised

    @property
    def blank(self) -> Sequence[int]:
        """For checks."""
        return self.blank_slots

    def cached(self) -> dict[int, int]:
        """Block -> slot, the first to leave first, those of pinned blocks last. For checks and pictures."""
        return {**self.cached_slots, **self.pinned_slots}

    @property
    def num_passing(self) -> int:
        """Cached states that were kept in passing and have not been used."""
        return len(self.passing)

    def is_pinned(self, block: int) -> bool:
        """Whether the state of this block stands aside for a pin."""
        return block in self.pinned_slots

    def is_passing(self, block: int) -> bool:
        """Whether the state of this block was kept in passing and has not been used."""
        return block in self.passing

    def slot_of(self, block: int) -> int | None:
        """The slot with the state after this block, if it carries one."""
        slot = self.cached_slots.get(block)
        return self.pinned_slots.get(block) if slot is None else slot

    def num_usable(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, each under the one before, are worth a hit: up to the deepest with a state."""
        for count in range(len(blocks), 0, -1):
            if self.slot_of(blocks[count - 1]) is not None:
                return count
        return 0

    # -- a sequence's own slot -----------------------------------------------------------------------------------------

    def begin(self, running: int | None) -> int:
        """A running slot for a sequence that has computed nothing: the one it has, or a new one."""
        running = self._take() if running is None else running
        self._copies.append(SlotCopy(ZERO_SLOT, running))
        return running

    def begin_after(self, block: int, running: int | None) -> int:
        """The same for one that goes on behind this block, which carries a state."""
        source = self.use(block)
        running = self._take() if running is None else running
        if source != running:  # else nothing but this very state could make room
            self._copies.append(SlotCopy(source, running))
        return running

    def fork(self, running: int) -> int:
        """A running slot for a second sequence, with the state that this one will have when copies are made."""
        child = self._take()
        self._copies.append(SlotCopy(running, child))
        return child

    def give_back(self, slot: int) -> None:
        """A table lets go of its running slot. Copies into it that were not made yet do no harm."""
        self.blank_slots.append(slot)

    # -- states that are kept ------------------------------------------------------------------------------------------

    def promise(self, running: int, last_kept: int | None) -> int | None:
        """A slot for the state that a step will leave behind in this running slot; None if all are in use.

        `last_kept` is the block whose state this sequence kept last: if that was in passing, its slot is used again.
        """
        if self._num_promised + len(self.pinned_slots) >= self._max_fixed:
            return None
        if last_kept is not None and last_kept in self.passing:
            slot = self.cached_slots.pop(last_kept)
            self.passing.discard(last_kept)
        else:
            slot = self._take()
        self._num_promised += 1
        self._keeps.append(SlotCopy(running, slot))
        return slot

    def attach(self, block: int, slot: int, keep: StateCheckpoint) -> None:
        """The step has returned, and the promised state is true: this named block carries it from now on. Where the
        block carries an equal one already, that one stays.
        """
        if self.slot_of(block) is not None:
            self.use(block)
            self.break_promise(slot)
            return
        self._num_promised -= 1
        self.cached_slots[block] = slot
        if keep is StateCheckpoint.TRANSIENT:
            self.passing.add(block)
        elif keep is StateCheckpoint.SPARSE:
            self.cached_slots.move_to_end(block, last=False)

    def break_promise(self, slot: int) -> None:
        """The row failed, or its block has no name: what was written into the slot is no sequence's state."""
        self._num_promised -= 1
        self.blank_slots.append(slot)

    def use(self, block: int) -> int:
        """The slot of a block that carries one: most recently used from now on, and not in passing any more."""
        self.passing.discard(block)
        if block in self.pinned_slots:
            return self.pinned_slots[block]
        self.cached_slots.move_to_end(block)
        return self.cached_slots[block]

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks lose their names: a state never outlives its block."""
        for block in blocks:
            slot = self.cached_slots.pop(block, None)
            if slot is not None:
                self.passing.discard(block)
                self.blank_slots.append(slot)
            elif block in self.pinned_slots:
                raise InvariantError(f"forget: block {block} is pinned, and its state with it")

    def clear(self) -> None:
        """Forget every cached state."""
        self.blank_slots += [*self.cached_slots.values(), *self.pinned_slots.values()]
        self.cached_slots, self.pinned_slots, self.passing = OrderedDict(), {}, set()

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin_state(self, block: int) -> None:
        """The state of this block, if it carries one, stays as long as its pin."""
        if block in self.cached_slots:
            self.pinned_slots[block] = self.cached_slots.pop(block)
            self.passing.discard(block)

    def unpin_states(self, blocks: Iterable[int]) -> None:
        """These blocks are pinned no more; their states are the most recently used."""
        for block in blocks:
            if block in self.pinned_slots:
                self.cached_slots[block] = self.pinned_slots.pop(block)

    def may_pin(self, block: int, share: float) -> bool:
        """Whether the state of one more block may stand aside, within this share of what running ones do not need."""
        return block in self.pinned_slots or (
            len(self.pinned_slots) + 1 <= share * self._max_fixed
            and len(self.pinned_slots) + self._num_promised < self._max_fixed
        )

    # -- what the runner moves -----------------------------------------------------------------------------------------

    def take_moves(self) -> tuple[tuple[SlotCopy, ...], tuple[SlotCopy, ...]]:
        """The copies to make before the next step and the states to keep after it, each once."""
        copies, keeps = tuple(self._copies), tuple(self._keeps)
        self._copies, self._keeps = [], []
        return copies, keeps

    def _take(self) -> int:
        if self.blank_slots:
            return self.blank_slots.pop()
        if not self.cached_slots:
            raise InvariantError(f"all {self.num_slots} state slots are in use: too many sequences run")
        block, slot = self.cached_slots.popitem(last=False)
        self.passing.discard(block)
        self.num_evictions += 1
        return slot
