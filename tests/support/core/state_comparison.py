"""One life for a memory with state slots and for the slow reference, compared at every lookup."""

from random import Random

from quire.core.digests import BlockHasher
from quire.core.memory.block_table import BlockTable
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.state_slots import StateCheckpoint
from quire.errors import OutOfBlocksError
from tests.support.core.reference_states import Prefix, ReferenceSequence, ReferenceStates
from tests.support.core.shadow import KEY, named_tokens, namespace

MAX_OPEN = 3


class StateComparison:
    """A few open sequences that run in turns, in a pool with too few blocks and too few slots for what they share."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.block_size = self.random.choice((1, 2, 4))
        self.num_blocks = self.random.choice((40, 60))
        num_slots = MAX_OPEN + self.random.choice((1, 2, 5, 12))
        config = KVMemoryConfig(self.num_blocks, self.block_size, num_slots=num_slots, num_running_slots=MAX_OPEN)
        self.memory = KVMemory(config, BlockHasher(KEY))
        self.reference = ReferenceStates(self.num_blocks, self.block_size, num_slots, MAX_OPEN)
        self.pairs: list[tuple[BlockTable, ReferenceSequence]] = []
        self.prompts = [self._tokens(12 * self.block_size) for _ in range(12)]
        self.num_lookups = 0
        self.num_mismatches = 0
        self.num_hits = 0
        self.num_states_missed = 0
        """Lookups that found blocks behind the last state."""

    def run(self, num_lookups: int) -> None:
        end = self.num_lookups + num_lookups
        while self.num_lookups < end:
            self._begin()
            for _ in range(self.random.randint(1, 4)):
                self._go_on(*self.random.choice(self.pairs))
            while len(self.pairs) > self.random.randint(0, MAX_OPEN - 1):
                table, one = self.pairs.pop(self.random.randrange(len(self.pairs)))
                self.memory.release(table)
                self.reference.end(one)
            if self.random.random() < 0.02:
                count = self.random.randint(1, 6)
                self.memory.evict(count)
                self.reference.evict(count)

    def _tokens(self, most: int) -> Prefix:
        return tuple(self.random.choice((0, 0, 1)) for _ in range(self.random.randint(1, most)))

    def _begin(self) -> None:
        """Some prompts are popular; each goes on in its own way after a while."""
        head = self.prompts[min(int(self.random.expovariate(0.4)), len(self.prompts) - 1)]
        tokens = head[: self.random.randint(1, len(head))] + self._tokens(2 * self.block_size)
        table = self.memory.open(namespace(self.block_size))
        found, one = self.memory.match(table, tokens), self.reference.begin(tokens)
        self.pairs.append((table, one))
        self._compare(table, one, found, one.num_computed)

    def _look_again(self, table: BlockTable, one: ReferenceSequence) -> None:
        self._compare(table, one, self.memory.match(table, one.tokens), self.reference.look(one))

    def _compare(self, table: BlockTable, one: ReferenceSequence, found: int, expected: int) -> None:
        self.num_lookups += 1
        self.num_hits += expected > 0
        self.num_states_missed += table.num_matched * self.block_size > table.num_computed
        held = [token for block in table.blocks for token in named_tokens(self.memory, block)]
        self.num_mismatches += found != expected or held[:found] != list(one.tokens[:found]) or not self._is_alike()

    def _is_alike(self) -> bool:
        """What can be counted is equal; now and then also which states there are, and in what order they leave."""
        memory, reference = self.memory, self.reference
        counted = (memory.slots.num_cached, memory.pool.num_named, memory.stats().num_evictions)
        expected = (len(reference.states), len(reference.last_used), reference.num_block_evictions)
        if counted != expected or memory.slots.num_evictions != reference.num_state_evictions:
            return False
        return self.num_lookups % 16 > 0 or [*map(self._prefix_of, memory.slots.cached())] == reference.states

    def _prefix_of(self, block: int) -> Prefix:
        tokens: Prefix = ()
        while block > 0:
            tokens = named_tokens(self.memory, block) + tokens
            block = self.memory.tree.parent_of(block)
        return tokens

    def _go_on(self, table: BlockTable, one: ReferenceSequence) -> None:
        if one.num_computed == len(one.tokens):
            one.tokens += self._tokens(self.block_size)
        elif self.random.random() < 0.3:
            self._look_again(table, one)
        size = self.block_size
        num_left = len(one.tokens) - one.num_computed
        num_to_border = size - one.num_computed % size
        num_tokens = min(num_left, self.random.choice((1, num_to_border, num_to_border + size, num_left)))
        is_on_border = (one.num_computed + num_tokens) % size == 0
        keep: StateCheckpoint | None = self.random.choice((None, *StateCheckpoint)) if is_on_border else None
        fails = self.random.random() < 0.05
        try:
            self.memory.reserve(table, one.tokens, num_tokens, keep=keep)
            self.memory.slots.pop_copies()
            self.memory.commit(table, 0 if fails else num_tokens)
            has_run = True
        except OutOfBlocksError:
            has_run = False
        is_alike = self.reference.run(one, num_tokens, keep, fails=fails) == has_run
        self.num_mismatches += not is_alike or table.num_computed != one.num_computed
