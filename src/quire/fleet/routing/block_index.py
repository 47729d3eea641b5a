"""Which members hold which blocks, as far as known to a router: name -> bits of members.

    confirmed   name ─► 0b0110      by the members' KV events
    expected    name ─► 0b1000      a request is on its way there and will leave it there

A member holds a block if either has its bit. Of a prompt on its way not all blocks are noted but those at marks, which
thin out with depth: 89 of 400, exact to a sixteenth of the depth for the half minute until events confirm. Bits live in
many small dictionaries, chosen by a name's last bits: none grows for long, and each can be swept by itself. With
integers for keys and values the garbage collector skips them.

A member that leaves, or clears its cache, loses its bit at once, because reads are masked by the bits in use; the
entries are swept little by little, and only then is the bit reused.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.errors import InvariantError

UNCONFIRMED_S = 30.0
"""How long an unconfirmed block is expected to come."""
NUM_SHARDS = 1024
SWEPT_AT_ONCE = 4096
"""Entries visited by one call of `sweep`, and the rest of the last shard."""


MAX_GROUPS_KEPT = 4096
"""Sets of members whose names are cached, instead of being collected bit by bit each time."""
EXACT_BLOCKS = 32
MARKS = (
    *range(1, EXACT_BLOCKS + 1),
    *(start + at * start // 16 for start in (EXACT_BLOCKS << octave for octave in range(16)) for at in range(1, 17)),
)
"""Which blocks of a prompt are noted while no event confirms them, counted from 1: each of the first 32, then sixteen
from each power of two to the next."""


class _Holder:
    """A member, its bit, and the blocks expected there soon."""

    __slots__ = ("bit", "has_bits_set", "unconfirmed")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.has_bits_set = False
        """Whether an entry may have this bit: if none has, there is nothing to sweep."""
        self.unconfirmed: dict[int, float] = {}
        """Name -> until when it is expected."""


class BlockIndex:
    """Blocks by member. Wrong entries cost tokens and nothing else; events of members not in the index are ignored."""

    def __init__(self, num_shards: int = NUM_SHARDS, swept_at_once: int = SWEPT_AT_ONCE) -> None:
        if num_shards < 1 or num_shards & (num_shards - 1):
            raise InvariantError(f"expected a power of two as the number of shards, got {num_shards}")
        self.confirmed: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._expected: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._shard_mask = num_shards - 1
        self._swept_at_once = swept_at_once
        self.holders: dict[str, _Holder] = {}
        self.member_of: dict[int, str] = {}
        """Bit -> member, of the bits in use."""
        self.num_bits = 0
        self._groups: dict[int, tuple[str, ...]] = {}
        """Bits -> their members. Made anew when a bit gets another member."""
        self.masks: dict[frozenset[str], int] = {}
        """The reverse, of sets that were looked up."""
        self._free_bits: list[int] = []
        self._dead = 0
        """Bits that the next round of sweeping takes out of the entries."""
        self._sweeping = 0
        """Bits that the round under way takes out, from the shards with this number on."""
        self._next_shard = 0
        self._batches: deque[tuple[float, _Holder, list[int]]] = deque()
        """What to check again: when, of which member, and the names left. The first due first."""

    def __len__(self) -> int:
        """Names that members have confirmed, those among them that await sweeping."""
        return sum(map(len, self.confirmed))

    @property
    def num_unconfirmed(self) -> int:
        return sum(len(holder.unconfirmed) for holder in self.holders.values())

    @property
    def members(self) -> Sequence[str]:
        return tuple(self.holders)

    @property
    def is_swept(self) -> bool:
        """Whether no entry has the bit of a member that left or cleared its cache."""
        return not self._dead and not self._sweeping

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, member: str) -> None:
        """A member with an empty cache."""
        if member in self.holders:
            raise InvariantError(f"join: {member!r} is in the index already")
        self.holders[member] = _Holder(self._take_bit(member))

    def leave(self, member: str) -> None:
        """Nothing is read of it from now on, and its later events are ignored."""
        holder = self.holders.pop(member, None)
        if holder is None:
            raise InvariantError(f"leave: {member!r} is not in the index")
        self._drop_bit(holder)
        holder.unconfirmed.clear()

    def _take_bit(self, member: str) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self.num_bits
            self.num_bits += 1
        self.member_of[bit] = member
        self._groups, self.masks = {}, {}
        return bit

    def _drop_bit(self, holder: _Holder) -> None:
        self.masks = {}
        del self.member_of[holder.bit]
        if holder.has_bits_set:
            self._dead |= holder.bit
        else:
            self._free_bits.append(holder.bit)

    # -- KV events of members ------------------------------------------------------------------------------------------

    def stored(self, member: str, names: Sequence[int]) -> None:
        """These blocks are cached there now, and confirmed if they were expected."""
        holder = self.holders.get(member)
        if holder is None:
            return
        shards, shard_mask, bit, unconfirmed = self.confirmed, self._shard_mask, holder.bit, holder.unconfirmed
        holder.has_bits_set = True
        for name in names:
            shard = shards[name & shard_mask]
            held = shard.get(name)
            # One object for all entries of this member alone.
            shard[name] = bit if held is None else held | bit
        if unconfirmed:
            for name in names:
                if name in unconfirmed:
                    self._drop_expected(holder, name)

    def removed(self, member: str, names: Sequence[int]) -> None:
        """These blocks are no longer cached there, expected or not."""
        holder = self.holders.get(member)
        if holder is None:
            return
        shards, shard_mask, bit, unconfirmed = self.confirmed, self._shard_mask, holder.bit, holder.unconfirmed
        for name in names:
            _unset(shards[name & shard_mask], name, bit)
            if name in unconfirmed:
                self._drop_expected(holder, name)

    def cleared(self, member: str) -> None:
        """No block is cached there any more. As cheap as leaving: the member gets another bit."""
        holder = self.holders.get(member)
        if holder is None:
            return
        holder.unconfirmed.clear()
        if holder.has_bits_set:
            self._drop_bit(holder)
            holder.bit, holder.has_bits_set = self._take_bit(member), False

    # -- expected blocks -----------------------------------------------------------------------------------------------

    def optimistic(self, member: str, names: Sequence[int], now_s: float) -> None:
        """A prompt with these blocks, from its first on, is sent there now: they count as held until an event confirms
        or removes them, or none has for 30 s. Those noted already get a new deadline."""
        holder = self.holders.get(member)
        if holder is None or not names:
            return
        until_s, marked = now_s + UNCONFIRMED_S, _at_marks(names)
        shards, shard_mask, bit = self._expected, self._shard_mask, holder.bit
        holder.has_bits_set = True
        for name in marked:
            shard = shards[name & shard_mask]
            held = shard.get(name)
            shard[name] = bit if held is None else held | bit
        holder.unconfirmed.update(dict.fromkeys(marked, until_s))
        self._batches.append((until_s, holder, marked))

    def withdraw(self, member: str, names: Sequence[int], at_s: float) -> None:
        """Undo `optimistic` of that moment: the member has not taken the prompt. What was noted again since stays."""
        holder = self.holders.get(member)
        if holder is None:
            return
        for name in _at_marks(names):
            if holder.unconfirmed.get(name) == at_s + UNCONFIRMED_S:
                self._drop_expected(holder, name)

    def _drop_expected(self, holder: _Holder, name: int) -> None:
        del holder.unconfirmed[name]
        _unset(self._expected[name & self._shard_mask], name, holder.bit)

    # -- reading -------------------------------------------------------------------------------------------------------

    def depths(self, names: Sequence[int]) -> dict[str, int]:
        """How many of these blocks, the first to the last of a prompt, each member holds that holds the first.

        By binary search, which is valid because eviction takes leaves first: a member with block d holds all before it.
        Members that hold the same blocks are searched for together. Of one that breaks the rule some block is
        found that it holds and whose next it does not hold.
        """
        return {
            member: depth
            for depth, members in self.groups(names, frozenset(self.holders))
            for member in members
            if depth
        }

    def groups(self, names: Sequence[int], among: frozenset[str]) -> list[tuple[int, tuple[str, ...]]]:
        """The same as depths, of some members, each depth with its members, 0 too: there are far fewer depths
        than members. To be called with the same set again and again: its bits are cached."""
        found: list[tuple[int, tuple[str, ...]]] = []

        def look(depth: int, members: tuple[str, ...]) -> int:
            found.append((depth, members))
            return 0

        self.visit(names, among, look)
        return found

    def visit(self, names: Sequence[int], among: frozenset[str], look: Callable[[int, tuple[str, ...]], int]) -> None:
        """Pass each depth and its members to `look`, the deepest first as far as events confirm. `look` returns the
        depth from which on others matter: members with less are not searched for."""
        rest = self.masks.get(among)
        if rest is None:
            rest = self.masks[among] = self._bits_of_members(among)
        least = bound = 0
        while rest and (least <= 0 or self._reaches(names, least, rest, bound)):
            depth, group, bound = self._deepest(names, rest)
            rest ^= group
            for deeper, expecting in self._deeper(names, depth, group):
                least = max(least, look(deeper, self._members(expecting)))
                group ^= expecting
            if group:
                least = max(least, look(depth, self._members(group)))

    def _reaches(self, names: Sequence[int], depth: int, group: int, bound: int) -> bool:
        """Whether some of a group, of which no member has confirmed as many as `bound`, may hold so many of
        these blocks. A member that does holds all before them, and of expected blocks those at marks."""
        if depth > len(names):
            return False
        name = names[MARKS[bisect_right(MARKS, depth) - 1] - 1]
        at = name & self._shard_mask
        if self._expected[at].get(name, 0) & group:
            return True
        return depth < bound and bool(self.confirmed[at].get(name, 0) & group)

    def _deepest(self, names: Sequence[int], group: int) -> tuple[int, int, int]:
        """The most of these blocks that members of a group have confirmed, which members those are, and a number that
        no other member of the group has."""
        shards, shard_mask = self.confirmed, self._shard_mask
        low, high, bound = 0, len(names), 0
        while low < high:  # all of the group hold `low` blocks, and none holds more than `high`
            # The first block decides most: it is checked first.
            middle = (low + high + 1) >> 1 if low else 1
            name = names[middle - 1]
            held = shards[name & shard_mask].get(name, 0) & group
            if held:
                if held != group:
                    bound = middle
                group, low = held, middle
            elif low:
                high = middle - 1
            else:
                break
        return low, group, bound

    def _bits_of_members(self, members: Iterable[str]) -> int:
        bits = 0
        for member in members:
            holder = self.holders.get(member)
            if holder is not None:
                bits |= holder.bit
        return bits

    def _deeper(self, names: Sequence[int], depth: int, group: int) -> list[tuple[int, int]]:
        """Those of a group, all with this confirmed depth, that are expected to have a greater one."""
        mark = MARKS[bisect_right(MARKS, depth)]
        if mark > len(names):
            return []
        name = names[mark - 1]
        expecting = self._expected[name & self._shard_mask].get(name, 0) & group
        if not expecting:
            return []
        marks = MARKS[bisect_right(MARKS, depth) : bisect_right(MARKS, len(names))]
        return self._search_marks(names, marks, expecting)

    def _search_marks(self, names: Sequence[int], marks: Sequence[int], group: int) -> list[tuple[int, int]]:
        """Which of these depths members are expected to have, and their bits; of a group that is expected to have the
        first."""
        shards, shard_mask = self._expected, self._shard_mask
        open_groups = [(group, 0, len(marks) - 1)]
        found: list[tuple[int, int]] = []
        while open_groups:
            # All of `group` hold the block at `low`, and none holds one behind `high`.
            group, low, high = open_groups.pop()
            while low < high:
                middle = (low + high + 1) // 2
                name = names[marks[middle] - 1]
                held = shards[name & shard_mask].get(name, 0) & group
                if not held:
                    high = middle - 1
                    continue
                if held != group:
                    open_groups.append((group ^ held, low, middle - 1))
                    group = held
                low = middle
            found.append((marks[low], group))
        return found

    def _members(self, bits: int) -> tuple[str, ...]:
        members = self._groups.get(bits)
        if members is not None:
            return members
        if len(self._groups) >= MAX_GROUPS_KEPT:
            self._groups = {}
        members = self._groups[bits] = tuple(self.member_of[bit] for bit in _bits_of(bits))
        return members

    def holders_of(self, name: int) -> Iterator[str]:
        """Members that hold this block. For checks and explanations."""
        at = name & self._shard_mask
        held = self.confirmed[at].get(name, 0) | self._expected[at].get(name, 0)
        return (member for member, holder in self.holders.items() if held & holder.bit)

    # -- sweeping ------------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Take back what was not confirmed in time, and some entries of members that left. A bounded piece of work;
        to be called now and then."""
        self._take_back(now_s)
        self._sweep_bits()

    def _take_back(self, now_s: float) -> None:
        budget = self._swept_at_once
        while budget and self._batches and self._batches[0][0] <= now_s:
            _, holder, names = self._batches[0]
            for name in reversed(names[-budget:]):  # leaves first, so that a prompt's rest is still a prefix
                if name in holder.unconfirmed and holder.unconfirmed[name] <= now_s:
                    self._drop_expected(holder, name)
            looked_at = min(budget, len(names))
            del names[len(names) - looked_at :]
            budget -= looked_at
            if not names:
                self._batches.popleft()

    def _sweep_bits(self) -> None:
        if not self._sweeping:
            self._sweeping, self._dead, self._next_shard = self._dead, 0, 0
        budget, dead = self._swept_at_once, self._sweeping
        while self._sweeping and budget > 0:
            for shards in (self.confirmed, self._expected):
                budget -= len(shards[self._next_shard])
                shards[self._next_shard] = _without(shards[self._next_shard], dead)
            self._next_shard += 1
            if self._next_shard > self._shard_mask:
                self._free_bits += _bits_of(dead)
                self._sweeping = 0


def _unset(shard: dict[int, int], name: int, bit: int) -> None:
    held = shard.get(name, 0)
    if held == bit:
        del shard[name]
    elif held & bit:
        shard[name] = held ^ bit


def _without(shard: dict[int, int], bits: int) -> dict[int, int]:
    """A new dictionary, as small as it can be, if any of its entries has one of these bits."""
    if not any(held & bits for held in shard.values()):
        return shard
    # Masks that stay as they are stay the objects they are: many entries share one.
    kept = ((name, held & ~bits if held & bits else held) for name, held in shard.items())
    return {name: held for name, held in kept if held}


def _at_marks(names: Sequence[int]) -> list[int]:
    return [names[depth - 1] for depth in MARKS[: bisect_right(MARKS, len(names))]]


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
