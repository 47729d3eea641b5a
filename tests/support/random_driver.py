"""A seeded stream of random operations on a shadowed memory. The same seed gives the same operations.

Vocabularies of two or three tokens make prefixes meet at once; pools are small against what the sequences want, so that
eviction, preemption and shortage are the rule.
"""

from collections import Counter
from random import Random

from quire.core import invariants
from quire.core.digests import BlockHasher
from quire.core.kv_shapes import KVMemoryConfig
from quire.errors import PinBudgetError
from tests.support.shadow import Shadowed, ShadowedMemory, namespace


class RandomDriver:
    """Counts one operation per verb called on the memory."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        block_size: int,
        *,
        hasher: BlockHasher | None = None,
        check_every: int = 1000,
        max_sequences: int = 64,
    ) -> None:
        self.random = Random(seed)
        config = KVMemoryConfig(num_blocks, block_size, max_pin_s=50.0, num_evictions_remembered=256)
        self.shadow = ShadowedMemory(config, hasher=hasher, listen=self.random.random() < 0.5)
        self.namespaces = [namespace(block_size), namespace(block_size, "other"), namespace(block_size, adapter="a")]
        self.vocabulary = self.random.choice((2, 2, 3, 50))
        self.max_tokens = min(2048, max(2, self.random.choice((1, 2, 3)) * num_blocks * block_size // 2))
        self.max_sequences = min(max_sequences, max(2, num_blocks // 2))
        self.check_every = check_every
        self.ops: Counter[str] = Counter()
        self.num_checks = 0
        self.now_s = 0.0
        self.live: list[Shadowed] = []
        # Prompts people send again: what makes a prefix cache worth having.
        self.prompts = [(self.random.choice(self.namespaces), self._tokens()) for _ in range(12)]

    @property
    def num_ops(self) -> int:
        return self.ops.total()

    def run(self, num_ops: int) -> None:
        end, next_check = self.num_ops + num_ops, self.num_ops + self.check_every
        actions = [self.begin] * 2 + [self.step] * 5
        actions += [self.finish, self.fork, self.preempt, self.cancel, self.pin, self.tick]
        while self.num_ops < end:
            self.random.choice(actions)()
            if self.random.random() < 0.01:
                self.random.choice((self.evict, self.clear, self.unpin))()
            if self.num_ops >= next_check:
                self.check()
                next_check = self.num_ops + self.check_every

    def rest(self) -> None:
        """Release everything; nothing may remain but cached blocks."""
        for sequence in list(self.live):
            self._release(sequence)
        self.shadow.memory.advance(self.now_s + 1e6)
        while self.shadow.memory.pins.tables:
            self.shadow.memory.advance(self.now_s + 1e6)
        invariants.check_at_rest(self.shadow.memory)
        assert not self.shadow.memory.pool.num_referenced

    def check(self) -> None:
        self.shadow.verify_all()
        self.num_checks += 1

    def _tokens(self) -> list[int]:
        length = max(1, int(self.max_tokens ** self.random.random()))
        return [self.random.randrange(self.vocabulary) for _ in range(length)]

    def begin(self) -> None:
        if len(self.live) >= self.max_sequences:
            return
        if self.random.random() < 0.6:
            space, tokens = self.random.choice(self.prompts)
            tokens = tokens[: self.random.randint(1, len(tokens))]
        else:
            space, tokens = self.random.choice(self.namespaces), self._tokens()
        self.live.append(self.shadow.begin(space, tokens))
        self.ops["open"] += 1
        self.ops["hit"] += 1

    def step(self) -> None:
        """Reserve for some, let others look for hits meanwhile, then commit or fail each row."""
        self.random.shuffle(self.live)
        for sequence in self.live[: self.random.randint(1, 6)]:
            if not sequence.table.is_open:
                continue  # preempted to make room for one before it
            if not sequence.num_uncomputed:
                sequence.append(self.random.randrange(self.vocabulary))
            if self.random.random() < 0.3:
                self.shadow.match(sequence)
                self.ops["hit"] += 1
            chunk = self.random.choice((1, self.shadow.config.block_size, sequence.num_uncomputed))
            self.ops["allocate"] += 1
            if not self.shadow.reserve(sequence, min(chunk, sequence.num_uncomputed)):
                self.random.choice((self.preempt, self.cancel))()
        if self.random.random() < 0.2:
            self.begin()
        rows = len(self.shadow.in_flight)
        failed = [row for row in range(rows) if self.random.random() < 0.02]
        gone = [self.shadow.in_flight[row] for row in failed]
        self.shadow.finish_step(failed)
        self.live = [sequence for sequence in self.live if sequence not in gone]
        self.ops["commit"] += rows - len(failed)
        self.ops["failed_row"] += len(failed)

    def fork(self) -> None:
        if self.live and len(self.live) < self.max_sequences:
            sequence = self.random.choice(self.live)
            computed = sequence.table.num_computed
            at = self.random.choice((computed, max(0, computed - 1), self.random.randint(0, computed)))
            self.live.append(self.shadow.fork(sequence, at))
            self.ops["fork"] += 1

    def finish(self) -> None:
        self._release_one("release")

    def cancel(self) -> None:
        self._release_one("cancel")

    def preempt(self) -> None:
        """Release a victim and let it start again with what it knows."""
        resting = [sequence for sequence in self.live if not sequence.table.is_in_flight]
        if resting:
            victim = self.random.choice(resting)
            self._release(victim)
            self.live.append(self.shadow.begin(victim.namespace, victim.tokens))
            self.ops["preempt"] += 1

    def pin(self) -> None:
        space, tokens = self.random.choice(self.prompts)
        self.ops["pin"] += 1
        try:
            pin = self.shadow.memory.pin(space, tokens, self.now_s + self.random.random() * 100.0)
        except PinBudgetError:
            return
        if pin.num_tokens:
            self.shadow.pins.append(pin)

    def unpin(self) -> None:
        if self.shadow.pins:
            self.shadow.memory.unpin(self.shadow.pins.pop(self.random.randrange(len(self.shadow.pins))))
            self.ops["unpin"] += 1

    def tick(self) -> None:
        self.now_s += self.random.random()
        self.shadow.memory.advance(self.now_s)
        del self.shadow.pins[:-64]
        self.ops["tick"] += 1

    def evict(self) -> None:
        before = self.shadow.memory.pool.num_cached
        wanted = self.random.randint(0, 8)
        assert self.shadow.memory.evict(wanted) == min(before, wanted)
        self.ops["evict"] += 1

    def clear(self) -> None:
        if self.random.random() < 0.1:
            self.shadow.memory.clear()
            self.ops["clear"] += 1

    def _release_one(self, kind: str) -> None:
        resting = [sequence for sequence in self.live if not sequence.table.is_in_flight]
        if resting:
            self._release(self.random.choice(resting))
            self.ops[kind] += 1

    def _release(self, sequence: Shadowed) -> None:
        self.shadow.release(sequence)
        self.live.remove(sequence)
