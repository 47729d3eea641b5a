"""A seeded stream of random operations on a shadowed memory. The same seed gives the same operations.

Vocabularies of two or three tokens make prefixes meet at once; pools are small against what the sequences want, so that
eviction, preemption and shortage are the rule.
"""

from collections import Counter
from random import Random

from quire.core.digests import BlockHasher
from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.state_slots import StateCheckpoint
from tests.support.core.shadow import Shadowed, ShadowedMemory, namespace


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
        has_state: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.has_state = has_state
        self.max_sequences = min(64, max(2, num_blocks // 2))
        num_slots = self.max_sequences + self.random.choice((0, 1, 4, 4 * self.max_sequences)) if has_state else 0
        config = KVMemoryConfig(
            num_blocks,
            block_size,
            0.25,
            max_pin_s=50.0,
            num_evictions_remembered=256,
            num_slots=num_slots,
            num_running_slots=self.max_sequences if has_state else 0,
        )
        self.shadow = ShadowedMemory(config, hasher=hasher, listen=self.random.random() < 0.5)
        self.namespaces = [namespace(block_size), namespace(block_size, "other"), namespace(block_size, adapter="a")]
        self.vocabulary = self.random.choice((2, 2, 3, 50))
        self.max_tokens = min(2048, max(2, self.random.choice((1, 2, 3)) * num_blocks * block_size // 2))
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
        actions = [self.begin] * 2 + [self.reserve] * 5 + [self.finish_rows] * 5
        actions += [self.finish, self.fork, self.preempt, self.cancel, self.pin, self.tick]
        while self.num_ops < end:
            self.random.choice(actions)()
            if self.random.random() < 0.01:
                self.random.choice((self.evict, self.clear, self.unpin, self.ask))()
            if self.num_ops >= next_check:
                self.check()
                next_check = self.num_ops + self.check_every

    def fill(self) -> None:
        """Bring a large pool to its steady state: no blank block, so that whoever takes one evicts."""
        size, spaces = self.shadow.config.block_size, self.namespaces
        while self.shadow.memory.pool.num_blank:
            num_blocks = min(512, self.shadow.memory.pool.num_blank)
            tokens = [self.random.randrange(1 << 31) for _ in range(num_blocks * size)]
            sequence = self.shadow.begin(self.random.choice(spaces), tokens)
            assert self.shadow.reserve(sequence, len(tokens))
            self.shadow.finish_step()
            self.shadow.release(sequence)

    def rest(self) -> None:
        """Release everything; nothing may remain but cached blocks."""
        self.shadow.finish_step()
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

    def reserve(self) -> None:
        """Some sequences get blocks for what they know, or for a part of it; the rows stay in flight for a while."""
        for sequence in self.random.sample(self.live, min(len(self.live), self.random.randint(1, 4))):
            if not sequence.table.is_open or sequence.table.is_in_flight:
                continue  # preempted to make room for one before it, or being written
            if not sequence.num_uncomputed:
                sequence.append(self.random.randrange(self.vocabulary))
            if self.random.random() < 0.3:
                self.shadow.match(sequence)
                self.shadow.memory.is_computing(sequence.table, sequence.tokens)
                self.ops["hit"] += 1
            chunk = self.random.choice((1, self.shadow.config.block_size, sequence.num_uncomputed))
            chunk = min(chunk, sequence.num_uncomputed)
            drafts = self._drafts() if chunk == sequence.num_uncomputed and not self.has_state else []
            self.ops["allocate"] += 1
            if not self.shadow.reserve(sequence, chunk, drafts, self._keep(sequence, chunk)):
                self.random.choice((self.preempt, self.cancel))()

    def _keep(self, sequence: Shadowed, num_tokens: int) -> StateCheckpoint | None:
        """On a border a state is kept, as a rule: whatever for."""
        is_on_border = (sequence.table.num_computed + num_tokens) % self.shadow.config.block_size == 0
        if not self.has_state or not is_on_border:
            return None
        wanted: StateCheckpoint | None = self.random.choice((None, *StateCheckpoint))
        return wanted

    def _drafts(self) -> list[int]:
        """Guesses, now and then: a few, or enough for blocks of them."""
        count = self.random.choice((0, 0, 0, 1, self.shadow.config.block_size + 1))
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def finish_rows(self) -> None:
        """Some rows return: whole, in part, or failed; and what was not accepted may come back as other tokens."""
        rows = self.shadow.in_flight
        for sequence in self.random.sample(rows, self.random.randint(0, len(rows))):
            num_tokens = sequence.table.num_reserved - sequence.table.num_computed
            dice = self.random.random()
            if sequence.drafts and dice < 0.9:
                self.shadow.finish_row(sequence, num_tokens - self.random.randint(0, len(sequence.drafts)))
                self.ops["checked_drafts"] += 1
            elif dice < 0.9:
                self.shadow.finish_row(sequence, num_tokens)
                self.ops["commit"] += 1
            else:
                self.shadow.finish_row(sequence, self.random.randrange(num_tokens))
                self.ops["failed_row"] += 1
                if dice < 0.93:
                    self._release(sequence)
                elif dice < 0.97:
                    self.replace(sequence)

    def replace(self, sequence: Shadowed) -> None:
        sequence.replace_uncomputed([self.random.randrange(self.vocabulary) for _ in range(sequence.num_uncomputed)])
        self.ops["replace"] += 1

    def ask(self) -> None:
        """Questions that must change nothing."""
        space, tokens = self.random.choice(self.prompts)
        self.shadow.memory.divergence(space, tokens)
        self.shadow.memory.stats()
        self.ops["ask"] += 1

    def fork(self) -> None:
        resting = self._resting()
        if resting and len(self.live) < self.max_sequences:
            sequence = self.random.choice(resting)
            computed = sequence.table.num_computed
            at = self.random.choice((computed, max(0, computed - 1), self.random.randint(0, computed)))
            if self.has_state:
                at = computed if at else 0
            self.live.append(self.shadow.fork(sequence, at))
            self.ops["fork"] += 1

    def finish(self) -> None:
        self._release_one("release")

    def cancel(self) -> None:
        self._release_one("cancel")

    def preempt(self) -> None:
        """Release a victim and let it start again with what it knows."""
        resting = self._resting()
        if resting:
            victim = self.random.choice(resting)
            self._release(victim)
            self.live.append(self.shadow.begin(victim.namespace, victim.tokens))
            self.ops["preempt"] += 1

    def pin(self) -> None:
        space, tokens = self.random.choice(self.prompts)
        self.ops["pin"] += 1
        end_s, tenant = self.now_s + self.random.random() * 100.0, self.random.choice(("", "a", "b"))
        pin = self.shadow.memory.pin(space, tokens, end_s, tenant)
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
        resting = self._resting()
        if resting:
            self._release(self.random.choice(resting))
            self.ops[kind] += 1

    def _resting(self) -> list[Shadowed]:
        return [sequence for sequence in self.live if not sequence.table.is_in_flight]

    def _release(self, sequence: Shadowed) -> None:
        self.shadow.release(sequence)
        self.live.remove(sequence)
