"""What blocks and recurrent states would be with nothing but tuples of tokens: slow, obvious, and right.

Written without a look at pool, tree and slots. A block is the tuple of all tokens up to its end, a state is one more
fact about such a tuple, and who holds what is asked of those who are open. One row runs at a time.
"""

from quire.core.memory.state_slots import StateCheckpoint

Prefix = tuple[int, ...]


class ReferenceSequence:
    """One who computes: all it knows, and how far it has come."""

    def __init__(self, tokens: Prefix) -> None:
        self.tokens = tokens
        self.num_computed = 0
        self.has_slot = False
        self.newest: Prefix | None = None
        """Behind which it kept a state last."""


class ReferenceStates:
    """At most `num_blocks` blocks and `num_slots` states, those of open sequences included."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, num_running: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_slots
        self.may_keep = num_slots > num_running
        self.open: list[ReferenceSequence] = []
        self.last_used: dict[Prefix, int] = {}
        """All full blocks there are -> when somebody let go of them last."""
        self.states: list[Prefix] = []
        """Behind which a state is kept, the first to leave first."""
        self.passing: set[Prefix] = set()
        """Of those, kept in passing and used by nobody."""
        self.num_block_evictions = 0
        self.num_state_evictions = 0
        self._clock = 0

    # -- one sequence --------------------------------------------------------------------------------------------------

    def begin(self, tokens: Prefix) -> ReferenceSequence:
        """What it has computed at once is its hit."""
        one = ReferenceSequence(tokens)
        self.open.append(one)
        self.look(one)
        return one

    def look(self, one: ReferenceSequence) -> int:
        """Take the cached blocks that follow, up to the last of them with a state; at least one token is left."""
        start, size = one.num_computed, self.block_size
        if start % size:
            return 0
        reached = start
        for end in range(start + size, len(one.tokens), size):
            if one.tokens[:end] not in self.last_used:
                break
            if one.tokens[:end] in self.states:
                reached = end
        if reached > start:
            one.num_computed = reached
            self._use(one.tokens[:reached])
            self._get_slot(one)
        return reached - start

    def run(
        self, one: ReferenceSequence, num_tokens: int, keep: StateCheckpoint | None, *, fails: bool = False
    ) -> bool:
        """Compute the next tokens, and keep the state behind them. False, and nothing happens, if blocks are short."""
        end = one.num_computed + num_tokens
        num_wanted = self._num_blocks_of(end) - self._num_blocks_of(one.num_computed)
        if num_wanted > self.num_blocks - self._num_held():
            return False
        while self._num_there() + num_wanted > self.num_blocks:
            self._evict_block()
        self._get_slot(one)
        is_kept = keep is not None and self.may_keep
        if is_kept:
            if one.newest in self.passing:
                self._drop_state(one.newest)
            self._make_room_for_a_state()
        if fails:
            self._go_back(one)
            return True
        one.num_computed = end
        for prefix in self._full(one.tokens[:end]):
            self.last_used.setdefault(prefix, self._clock)
        if keep is not None and is_kept:
            one.newest = one.tokens[:end]
            self._keep(one.newest, keep)
        return True

    def end(self, one: ReferenceSequence) -> None:
        self.open.remove(one)
        self._let_go(self._full(one.tokens[: one.num_computed]))

    def evict(self, num_blocks: int) -> None:
        """Forget so many blocks that nobody holds, or all there are."""
        for _ in range(num_blocks):
            if self._leaves():
                self._evict_block()

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _full(self, tokens: Prefix) -> list[Prefix]:
        size = self.block_size
        return [tokens[:end] for end in range(size, len(tokens) + 1, size)]

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _held(self) -> set[Prefix]:
        return {prefix for one in self.open for prefix in self._full(one.tokens[: one.num_computed])}

    def _num_partial(self) -> int:
        return sum(one.num_computed % self.block_size > 0 for one in self.open)

    def _num_held(self) -> int:
        return len(self._held()) + self._num_partial()

    def _num_there(self) -> int:
        return len(self.last_used) + self._num_partial()

    def _leaves(self) -> list[Prefix]:
        """Those that nobody holds and no other block follows."""
        kept = self._held() | {prefix[: -self.block_size] for prefix in self.last_used}
        return [prefix for prefix in self.last_used if prefix not in kept]

    def _evict_block(self) -> None:
        # Of those let go together the longest comes first.
        victim = min(self._leaves(), key=lambda prefix: (self.last_used[prefix], -len(prefix)))
        del self.last_used[victim]
        self.num_block_evictions += 1
        if victim in self.states:
            self._drop_state(victim)

    def _let_go(self, prefixes: list[Prefix]) -> None:
        self._clock += 1
        for prefix in prefixes:
            self.last_used[prefix] = self._clock

    # -- states --------------------------------------------------------------------------------------------------------

    def _get_slot(self, one: ReferenceSequence) -> None:
        if not one.has_slot:
            self._make_room_for_a_state()
            one.has_slot = True

    def _make_room_for_a_state(self) -> None:
        if sum(one.has_slot for one in self.open) + len(self.states) == self.num_slots:
            self._drop_state(self.states[0])
            self.num_state_evictions += 1

    def _drop_state(self, prefix: Prefix | None) -> None:
        self.states = [one for one in self.states if one != prefix]
        self.passing = {one for one in self.passing if one != prefix}

    def _use(self, prefix: Prefix) -> None:
        self._drop_state(prefix)
        self.states.append(prefix)

    def _keep(self, prefix: Prefix, keep: StateCheckpoint) -> None:
        if prefix in self.states:
            self._use(prefix)
        elif keep is StateCheckpoint.SPARSE:
            self.states.insert(0, prefix)
        else:
            self.states.append(prefix)
            if keep is StateCheckpoint.TRANSIENT:
                self.passing.add(prefix)

    def _go_back(self, one: ReferenceSequence) -> None:
        """To the last state on its way, or to the beginning."""
        reached = [prefix for prefix in self._full(one.tokens[: one.num_computed]) if prefix in self.states]
        last = reached[-1] if reached else ()
        self._let_go([prefix for prefix in self._full(one.tokens[: one.num_computed]) if len(prefix) > len(last)])
        one.num_computed = len(last)
        if last:
            self._use(last)
        if one.newest is not None and len(one.newest) > len(last):
            one.newest = None
