"""The router's index of cached blocks: block name (hash) -> bitmask of members.

    confirmed   name ─► 0b0110      reported by the members' KV events
    expected    name ─► 0b1000      a request was sent to the member and will leave the block in its cache

A member counts as holding a block if its bit is in either mask. For a prompt just sent, only the blocks at certain
depths (`MARKS`) are recorded as expected: 89 of 400. So depths are exact to 1/16 until events confirm the blocks.
Masks are in many small dictionaries (shards), selected by a name's low bits: resizing one takes little time, and each
can be swept on its own. Their keys and values are integers, so the garbage collector skips them.

If a member leaves or clears its cache, its bit becomes invalid at once, because readers mask out unused bits. The
entries are swept gradually, and the bit is reused only after that.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.errors import InvariantError

Visitor = Callable[[int, tuple[str, ...]], int]
UNCONFIRMED_S = 30.0
"""Time until an expected block that no event has confirmed is dropped."""
NUM_SHARDS = 1024
ENTRIES_PER_SWEEP = 4096
"""Approximate number of entries visited per call of `sweep`, which always finishes a shard."""
MAX_CACHED_GROUPS = 4096
"""Maximum number of bitmasks whose member tuples are cached."""
EXACT_BLOCKS = 32
MARKS = (
    *range(1, EXACT_BLOCKS + 1),
    *(start + i * start // 16 for start in (EXACT_BLOCKS << octave for octave in range(16)) for i in range(1, 17)),
)
"""Depths (block positions, counted from 1) that are recorded as expected: each of the first 32, then sixteen between
each power of two and the next."""


class _Holder:
    """A member's bit and its expected blocks."""

    __slots__ = ("bit", "has_bits_set", "unconfirmed")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.has_bits_set = False
        """Whether any entry may have this bit; if not, the bit needs no sweep."""
        self.unconfirmed: dict[int, float] = {}
        """Block name -> time at which it is dropped if unconfirmed."""


class BlockIndex:
    """Blocks by member. Wrong entries only cost prefill. Events of members that are not in the index are ignored."""

    def __init__(self, num_shards: int = NUM_SHARDS, swept_at_once: int = ENTRIES_PER_SWEEP) -> None:
        if num_shards < 1 or num_shards & (num_shards - 1):
            raise InvariantError(f"expected a power of two as the number of shards, got {num_shards}")
        self.confirmed: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self.expected: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._shard_mask = num_shards - 1
        self._swept_at_once = swept_at_once
        self.holders: dict[str, _Holder] = {}
        self.member_of: dict[int, str] = {}
        """Bit in use -> member."""
        self.num_bits = 0
        self._groups: dict[int, tuple[str, ...]] = {}
        """Cache: bitmask -> members. Cleared when a bit is assigned to a member."""
        self.masks: dict[frozenset[str], int] = {}
        """Cache: set of members -> bitmask. Cleared when a bit is assigned or dropped."""
        self.free_bits: list[int] = []
        self.dead_bits = 0
        """Bits that the next sweep round removes from all entries."""
        self.sweeping_bits = 0
        """Bits that the current sweep round removes; it continues at shard `_next_shard`."""
        self._next_shard = 0
        self._batches: deque[tuple[float, _Holder, list[int]]] = deque()
        """Expected blocks to check for timeout: (deadline, member's holder, names), the earliest deadline first."""

    def __len__(self) -> int:
        """Number of confirmed names, including entries that await sweeping."""
        return sum(map(len, self.confirmed))

    @property
    def members(self) -> Sequence[str]:
        return tuple(self.holders)

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, member: str) -> None:
        """Add a member with an empty cache."""
        if member in self.holders:
            raise InvariantError(f"join: {member!r} is in the index already")
        self.holders[member] = _Holder(self._assign_bit(member))

    def leave(self, member: str) -> None:
        """Remove a member and all its blocks; its later events are ignored."""
        holder = self.holders.pop(member, None)
        if holder is None:
            raise InvariantError(f"leave: {member!r} is not in the index")
        self._drop_bit(holder)
        holder.unconfirmed.clear()

    def _assign_bit(self, member: str) -> int:
        if self.free_bits:
            bit = self.free_bits.pop()
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
            self.dead_bits |= holder.bit
        else:
            self.free_bits.append(holder.bit)

    # -- KV events of members ------------------------------------------------------------------------------------------

    def add_blocks(self, member: str, names: Sequence[int]) -> None:
        """Record blocks that the member has cached; expected ones are thereby confirmed."""
        holder = self.holders.get(member)
        if holder is None:
            return
        shards, shard_mask, bit, unconfirmed = self.confirmed, self._shard_mask, holder.bit, holder.unconfirmed
        holder.has_bits_set = True
        for name in names:
            shard = shards[name & shard_mask]
            mask = shard.get(name)
            # Entries of this member alone share one integer object.
            shard[name] = bit if mask is None else mask | bit
        if unconfirmed:
            for name in names:
                if name in unconfirmed:
                    self._drop_expected(holder, name)

    def remove_blocks(self, member: str, names: Sequence[int]) -> None:
        """Remove blocks that the member no longer caches, confirmed or expected."""
        holder = self.holders.get(member)
        if holder is None:
            return
        shards, shard_mask, bit, unconfirmed = self.confirmed, self._shard_mask, holder.bit, holder.unconfirmed
        for name in names:
            _clear_bit(shards[name & shard_mask], name, bit)
            if name in unconfirmed:
                self._drop_expected(holder, name)

    def clear_blocks(self, member: str) -> None:
        """Remove all blocks of a member. As cheap as `leave`, because the member gets a new bit."""
        holder = self.holders.get(member)
        if holder is None:
            return
        holder.unconfirmed.clear()
        if holder.has_bits_set:
            self._drop_bit(holder)
            holder.bit, holder.has_bits_set = self._assign_bit(member), False

    # -- expected blocks -----------------------------------------------------------------------------------------------

    def expect_blocks(self, member: str, names: Sequence[int], now_s: float) -> None:
        """Record that a prompt with these blocks (from its first) is sent to the member. They count as cached until an
        event confirms or removes them, or for `UNCONFIRMED_S`. Blocks that were expected before get a new deadline."""
        holder = self.holders.get(member)
        if holder is None or not names:
            return
        deadline_s, marked_names = now_s + UNCONFIRMED_S, _at_marks(names)
        shards, shard_mask, bit = self.expected, self._shard_mask, holder.bit
        holder.has_bits_set = True
        for name in marked_names:
            shard = shards[name & shard_mask]
            mask = shard.get(name)
            shard[name] = bit if mask is None else mask | bit
        holder.unconfirmed.update(dict.fromkeys(marked_names, deadline_s))
        self._batches.append((deadline_s, holder, marked_names))

    def withdraw_expected(self, member: str, names: Sequence[int], at_s: float) -> None:
        """Undo the `expect_blocks` call at `at_s`: the member has not run the prompt. Keep blocks of later calls."""
        holder = self.holders.get(member)
        if holder is None:
            return
        for name in _at_marks(names):
            if holder.unconfirmed.get(name) == at_s + UNCONFIRMED_S:
                self._drop_expected(holder, name)

    def _drop_expected(self, holder: _Holder, name: int) -> None:
        del holder.unconfirmed[name]
        _clear_bit(self.expected[name & self._shard_mask], name, holder.bit)

    # -- reading -------------------------------------------------------------------------------------------------------

    def depths(self, names: Sequence[int]) -> dict[str, int]:
        """Return each member's depth: the number of leading blocks of a prompt that it holds. Depths of 0 are omitted.

        Uses binary search, because members evict leaves first, so one that holds block d holds all blocks before it.
        Members with equal blocks are searched together. If a member has gaps, the result is the depth of some block
        that it holds whose successor it does not hold.
        """
        depths: dict[str, int] = {}

        def record_depth(depth: int, members: tuple[str, ...]) -> int:
            if depth:
                depths.update(dict.fromkeys(members, depth))
            return 0

        self.visit(names, frozenset(self.holders), record_depth)
        return depths

    def visit(self, names: Sequence[int], members: frozenset[str], visitor: Visitor) -> None:
        """Call the visitor with each depth and its members, the deepest confirmed depth first. It returns the minimum
        depth of interest: members with less are no longer searched. The mask of a set `members` is cached."""
        remaining = self.masks.get(members)
        if remaining is None:
            remaining = self.masks[members] = self._bits_of_members(members)
        min_depth = bound = 0
        while remaining and (min_depth <= 0 or self._may_reach(names, min_depth, remaining, bound)):
            depth, group, bound = self._deepest_group(names, remaining)
            remaining ^= group
            for expected_depth, expected_mask in self._expected_depths(names, depth, group):
                min_depth = max(min_depth, visitor(expected_depth, self._members(expected_mask)))
                group ^= expected_mask
            if group:
                min_depth = max(min_depth, visitor(depth, self._members(group)))

    def _may_reach(self, names: Sequence[int], depth: int, group: int, bound: int) -> bool:
        """Whether a member of the group may hold `depth` of these blocks. No member of it has confirmed `bound` blocks.
        Checks the last mark up to `depth`: a member that deep has confirmed it or is expected to have it."""
        if depth > len(names):
            return False
        name = names[MARKS[bisect_right(MARKS, depth) - 1] - 1]
        shard = name & self._shard_mask
        if self.expected[shard].get(name, 0) & group:
            return True
        return depth < bound and bool(self.confirmed[shard].get(name, 0) & group)

    def _deepest_group(self, names: Sequence[int], group: int) -> tuple[int, int, int]:
        """Return the greatest confirmed depth in a group, the mask of members with this depth, and an upper bound:
        every other member of the group has confirmed fewer blocks than the bound."""
        shards, shard_mask = self.confirmed, self._shard_mask
        low, high, bound = 0, len(names), 0
        while low < high:  # all members of `group` hold `low` blocks, and none holds more than `high`
            # Check the first block first, because it usually excludes the most members.
            middle = (low + high + 1) >> 1 if low else 1
            name = names[middle - 1]
            subgroup = shards[name & shard_mask].get(name, 0) & group
            if subgroup:
                if subgroup != group:
                    bound = middle
                group, low = subgroup, middle
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

    def _expected_depths(self, names: Sequence[int], depth: int, group: int) -> list[tuple[int, int]]:
        """Return (expected depth, mask) for members of a group whose expected depth exceeds their confirmed `depth`."""
        mark = MARKS[bisect_right(MARKS, depth)]
        if mark > len(names):
            return []
        name = names[mark - 1]
        expected_mask = self.expected[name & self._shard_mask].get(name, 0) & group
        if not expected_mask:
            return []
        marks = MARKS[bisect_right(MARKS, depth) : bisect_right(MARKS, len(names))]
        return self._search_marks(names, marks, expected_mask)

    def _search_marks(self, names: Sequence[int], marks: Sequence[int], group: int) -> list[tuple[int, int]]:
        """Return (expected depth, mask) pairs among the depths `marks`; all of the group are expected at the first."""
        shards, shard_mask = self.expected, self._shard_mask
        open_groups = [(group, 0, len(marks) - 1)]
        results: list[tuple[int, int]] = []
        while open_groups:
            # All members of `group` hold the block at mark `low`, and none holds a block after mark `high`.
            group, low, high = open_groups.pop()
            while low < high:
                middle = (low + high + 1) // 2
                name = names[marks[middle] - 1]
                subgroup = shards[name & shard_mask].get(name, 0) & group
                if not subgroup:
                    high = middle - 1
                    continue
                if subgroup != group:
                    open_groups.append((group ^ subgroup, low, middle - 1))
                    group = subgroup
                low = middle
            results.append((marks[low], group))
        return results

    def _members(self, bits: int) -> tuple[str, ...]:
        members = self._groups.get(bits)
        if members is not None:
            return members
        if len(self._groups) >= MAX_CACHED_GROUPS:
            self._groups = {}
        members = self._groups[bits] = tuple(self.member_of[bit] for bit in _bits_of(bits))
        return members

    # -- sweeping ------------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Drop some expected blocks that were not confirmed in time, and some entries of members that left. Each call
        does a bounded amount of work; call it regularly."""
        self._drop_overdue(now_s)
        self._sweep_bits()

    def _drop_overdue(self, now_s: float) -> None:
        budget = self._swept_at_once
        while budget and self._batches and self._batches[0][0] <= now_s:
            _, holder, names = self._batches[0]
            for name in reversed(names[-budget:]):  # leaves first, so that the remaining blocks form a prefix
                if name in holder.unconfirmed and holder.unconfirmed[name] <= now_s:
                    self._drop_expected(holder, name)
            num_checked = min(budget, len(names))
            del names[len(names) - num_checked :]
            budget -= num_checked
            if not names:
                self._batches.popleft()

    def _sweep_bits(self) -> None:
        if not self.sweeping_bits:
            self.sweeping_bits, self.dead_bits, self._next_shard = self.dead_bits, 0, 0
        budget, dead = self._swept_at_once, self.sweeping_bits
        while self.sweeping_bits and budget > 0:
            for shards in (self.confirmed, self.expected):
                budget -= len(shards[self._next_shard])
                shards[self._next_shard] = _clear_bits(shards[self._next_shard], dead)
            self._next_shard += 1
            if self._next_shard > self._shard_mask:
                self.free_bits += _bits_of(dead)
                self.sweeping_bits = 0


def _clear_bit(shard: dict[int, int], name: int, bit: int) -> None:
    mask = shard.get(name, 0)
    if mask == bit:
        del shard[name]
    elif mask & bit:
        shard[name] = mask ^ bit


def _clear_bits(shard: dict[int, int], bits: int) -> dict[int, int]:
    """Return the shard without these bits: a new, compact dictionary if any entry had one of them."""
    if not any(mask & bits for mask in shard.values()):
        return shard
    # Reuse the integer objects of unchanged masks, because many entries share one.
    entries = ((name, mask & ~bits if mask & bits else mask) for name, mask in shard.items())
    return {name: mask for name, mask in entries if mask}


def _at_marks(names: Sequence[int]) -> list[int]:
    return [names[depth - 1] for depth in MARKS[: bisect_right(MARKS, len(names))]]


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
