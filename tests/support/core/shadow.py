"""A KV memory with a shadow: what each physical slot truly holds, and what is truly cached.

Every slot of the pretended device holds a hash of the namespace and of all tokens up to its position. So a block that
is stale, foreign, unwritten or written twice differs at once from what its sequence expects, and each promise of the
memory becomes an equality. With recurrent layers the pretended device has state slots as well, each with the hash of
all tokens it has seen: copies are made when the next row is reserved, states are kept when a row returns. A second
shadow is built from the KV events alone: the set of prefixes that a router listening to them would believe in.
"""

from collections.abc import Sequence
from itertools import count

from quire.core.digests import BlockHasher, Namespace
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.core.inspect import invariants
from quire.core.memory.block_table import BlockTable, pack_tokens, unpack_tokens
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.pins import Pin
from quire.core.memory.state_slots import StateCheckpoint
from quire.errors import OutOfBlocksError

KEY = bytes(range(32))


def named_tokens(memory: KVMemory, block: int) -> tuple[int, ...]:
    """Of a block that the tree has; none of another."""
    return unpack_tokens(memory.tree.tokens_of(block)) if memory.tree.parent_of(block) else ()


class WeakHasher(BlockHasher):
    """A digest of eight bits: every other block collides, and nothing may go wrong because of it."""

    def root(self, namespace: Namespace) -> bytes:
        return super().root(namespace)[:1] * 32

    def child(self, parent_digest: bytes, packed_tokens: bytes) -> bytes:
        return super().child(parent_digest, packed_tokens)[:1] * 32


def namespace(block_size: int, cache_group: str = "group", adapter: str = "") -> Namespace:
    return Namespace(1, "model", adapter, "layout", block_size, cache_group)


class Shadowed:
    """A sequence as its client sees it: tokens, and what their KV must be."""

    __slots__ = ("contents", "drafts", "namespace", "table", "tokens")

    def __init__(self, namespace: Namespace, table: BlockTable, tokens: Sequence[int]) -> None:
        self.namespace = namespace
        self.table = table
        self.tokens: list[int] = []
        self.contents: list[int] = []
        self.drafts: list[int] = []
        """Guesses that the step in flight checks."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        before = self.contents[-1] if self.contents else hash(self.namespace)
        self.tokens.append(token)
        self.contents.append(hash((before, token)))

    def replace_uncomputed(self, tokens: Sequence[int]) -> None:
        """What was known beyond the computed tokens turns out to be something else."""
        del self.tokens[self.table.num_computed :], self.contents[self.table.num_computed :]
        for token in tokens:
            self.append(token)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.table.num_computed


class Listener:
    """Believes what the KV events say, as a router does."""

    def __init__(self) -> None:
        self.prefixes: dict[bytes, tuple[str, str, tuple[int, ...]]] = {}

    def __call__(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.prefixes.clear()
        elif isinstance(event, BlockRemoved):
            for digest in event.digests:
                del self.prefixes[digest]
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        key = (event.adapter, event.cache_group)
        before: tuple[int, ...] = ()
        if event.parent_digest is not None:
            parent = self.prefixes[event.parent_digest]  # KeyError: a child was announced before its parent
            assert parent[:2] == key
            before = parent[2]
        for index, digest in enumerate(event.digests):
            assert digest not in self.prefixes, "stored twice"
            before += event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            self.prefixes[digest] = (*key, before)


class ShadowedMemory:
    """The verbs of KVMemory, each followed by the question whether the device would agree."""

    def __init__(self, config: KVMemoryConfig, *, hasher: BlockHasher | None = None, listen: bool = True) -> None:
        self.config = config
        self.listener = Listener() if listen else None
        self.memory = KVMemory(config, hasher or BlockHasher(KEY), self.listener)
        self.device: dict[int, list[int]] = {}
        self.sequences: dict[int, Shadowed] = {}
        self.in_flight: list[Shadowed] = []
        self.pins: list[Pin] = []
        self._garbage = count(1)
        self.states: dict[int, int | None] = {0: None}
        """What each state slot holds; None is the state before the first token."""
        self._reserved: dict[int, int] = {}
        """Slots that states in flight go to -> from which."""

    def begin(self, namespace: Namespace, tokens: Sequence[int]) -> Shadowed:
        sequence = Shadowed(namespace, self.memory.open(namespace), tokens)
        self.sequences[sequence.table.table_id] = sequence
        self.match(sequence)
        return sequence

    def match(self, sequence: Shadowed) -> int:
        hit = self.memory.match(sequence.table, sequence.tokens)
        assert hit % self.config.block_size == 0
        assert hit == 0 or sequence.num_uncomputed >= 1, "a full hit leaves nothing to sample from"
        self.verify(sequence)
        return hit

    def reserve(
        self, sequence: Shadowed, num_tokens: int, drafts: Sequence[int] = (), keep: StateCheckpoint | None = None
    ) -> bool:
        """False when the pool is short; the memory must then be as before."""
        table, block_size = sequence.table, self.config.block_size
        before = (list(table.blocks), self.memory.pool.num_free)
        needed = self.memory.num_blocks_needed(table, num_tokens + len(drafts))
        copy, shortage = None, None
        try:
            copy = self.memory.reserve(table, sequence.tokens, num_tokens, drafts, keep)
        except OutOfBlocksError as error:
            shortage = error
        if shortage is not None:
            assert (shortage.num_needed, shortage.num_free) == (needed, before[1])
            assert needed > before[1]
            assert before == (table.blocks, self.memory.pool.num_free)
            return False
        assert needed == before[1] - self.memory.pool.num_free
        if copy is not None:
            assert copy.src in before[0], "a copy must come from the table's own block"
            self.device[copy.dst] = list(self.device[copy.src])
        fresh = set(table.blocks) - set(before[0]) - ({copy.dst} if copy else set())
        for block in fresh:
            # Whatever was there is gone: reading it before it is written must be noticed.
            self.device[block] = [-next(self._garbage)] * block_size
        sequence.drafts = list(drafts)
        self.in_flight.append(sequence)
        self._move_states(sequence)
        return True

    def _move_states(self, sequence: Shadowed) -> None:
        """A step begins: copies are made in order, and the row finds the state that belongs before its tokens."""
        copies, cache_copies = self.memory.slots.pop_copies()
        for copy in copies:
            self.states[copy.dst] = self.states[copy.src]
        self._reserved |= {copy.dst: copy.src for copy in cache_copies}
        if (slot := sequence.table.state_slot) is not None:
            start = sequence.table.num_computed
            before = sequence.contents[start - 1] if start else None
            assert self.states[slot] == before, f"table {sequence.table.table_id}: wrong state at {start}"

    def _write_state(self, sequence: Shadowed, *, is_whole: bool) -> None:
        """The row has run: its slot holds the state after all its tokens, or garbage; a reserved one has a copy."""
        table = sequence.table
        if table.state_slot is not None:
            last = sequence.contents[table.num_reserved - 1] if is_whole else -next(self._garbage)
            self.states[table.state_slot] = last
        if (slot := table.reserved_slot) is not None:
            self.states[slot] = self.states[self._reserved.pop(slot)]

    def finish_step(self, failed: Sequence[int] = ()) -> None:
        """The device runs what is in flight; rows whose index is in `failed` fail, and their sequences end."""
        done = list(self.in_flight)
        for index, sequence in enumerate(done):
            table = sequence.table
            self.finish_row(sequence, 0 if index in failed else table.num_reserved - table.num_computed)
            if index in failed:
                self.release(sequence)

    def finish_row(self, sequence: Shadowed, num_tokens: int) -> None:
        """One row returns: its first `num_tokens` are true, the rest is garbage. Drafts that were right are known."""
        table = sequence.table
        start, end = table.num_computed, table.num_reserved
        for token in sequence.drafts[: max(0, start + num_tokens - len(sequence.tokens))]:
            sequence.append(token)
        sequence.drafts = []
        garbage = [-next(self._garbage) for _ in range(end - start - num_tokens)]
        self._write(table, start, sequence.contents[start : start + num_tokens] + garbage)
        self._write_state(sequence, is_whole=start + num_tokens == end)
        self.memory.commit(table, num_tokens)
        self.in_flight.remove(sequence)
        self.verify(sequence)

    def fork(self, sequence: Shadowed, num_tokens: int) -> Shadowed:
        table = self.memory.fork(sequence.table, num_tokens)
        child = Shadowed(sequence.namespace, table, sequence.tokens)
        self.sequences[table.table_id] = child
        self.verify(child)
        return child

    def release(self, sequence: Shadowed) -> None:
        self.memory.release(sequence.table)
        del self.sequences[sequence.table.table_id]

    def verify(self, sequence: Shadowed) -> None:
        """Every computed slot of this sequence holds exactly what it must."""
        block_size, table = self.config.block_size, sequence.table
        for index in range(0, table.num_computed, block_size):
            expected = sequence.contents[index : min(index + block_size, table.num_computed)]
            held = self.device[table.blocks[index // block_size]][: len(expected)]
            assert held == expected, f"table {table.table_id}: wrong KV at {index}"
        if self.config.num_slots and table.num_computed and not table.is_in_flight:
            states = self._states_to_be()
            assert table.state_slot is not None
            expected_state = sequence.contents[table.num_computed - 1]
            assert states[table.state_slot] == expected_state, f"table {table.table_id}: wrong state"

    def _states_to_be(self) -> dict[int, int | None]:
        """What the slots will hold once the copies that are written down have been made."""
        states = dict(self.states)
        for copy in self.memory.slots._copies:
            states[copy.dst] = states[copy.src]
        return states

    def verify_all(self) -> None:
        """The promises, every live sequence, and what the events led a router to believe."""
        invariants.check(self.memory)
        for sequence in self.sequences.values():
            self.verify(sequence)
        if self.listener is not None:
            self._verify_listener(self.listener)

    def _verify_listener(self, listener: Listener) -> None:
        """A router that heard every event believes in exactly the named blocks, each after its true prefix."""
        tree, size = self.memory.tree, self.config.block_size
        late = Listener()
        for event in self.memory.stored_events():
            late(event)
        assert late.prefixes == listener.prefixes, "a router that came late believes something else"
        if not self.config.num_slots:
            assert len(listener.prefixes) == self.memory.pool.num_named
        for block in self.memory.slots.cached():
            assert tree.digest_of(block) in listener.prefixes, "a state that nobody was told of"
        believed = {prefix: digest for digest, prefix in listener.prefixes.items()}
        for digest, (adapter, group, tokens) in listener.prefixes.items():
            parent = believed.get((adapter, group, tokens[:-size]))
            if len(tokens) == size:
                parent = tree.hasher.root(namespace(size, group, adapter))
            assert parent is not None
            assert digest == tree.hasher.child(parent, pack_tokens(tokens[-size:]))
            assert tree.named(digest) is not None

    def _write(self, table: BlockTable, start: int, contents: list[int]) -> None:
        block_size = self.config.block_size
        position, end = start, start + len(contents)
        while position < end:
            index, offset = divmod(position, block_size)
            run = min(block_size - offset, end - position)
            self.device[table.blocks[index]][offset : offset + run] = contents[
                position - start : position - start + run
            ]
            position += run
