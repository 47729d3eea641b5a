"""The hypothesis state machine of the KV memory: any verb in any order, every promise after every step."""

from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.inspect import invariants
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.state_slots import StateCheckpoint
from tests.support.core.shadow import Shadowed, ShadowedMemory, namespace

TOKEN = st.integers(0, 1)
PICK = st.integers(0, 1_000_000)


class KVMemoryMachine(RuleBasedStateMachine):
    """Pools of 1 to 64 blocks, blocks of 1 to 16 tokens, a vocabulary of two: everything meets everything."""

    num_steps: ClassVar[int] = 0
    max_live: ClassVar[int] = 1_000_000

    @initialize(num_blocks=st.integers(1, 64), block_bits=st.integers(0, 4), num_spare_slots=st.integers(0, 9))
    def start(self, num_blocks: int, block_bits: int, num_spare_slots: int) -> None:
        self.size = 1 << block_bits
        config = KVMemoryConfig(num_blocks, self.size, 0.25, max_pin_s=8.0, num_evictions_remembered=4)
        self.shadow = ShadowedMemory(self.configured(config, num_spare_slots))
        self.spaces = [namespace(self.size), namespace(self.size, "other")]
        self.live: list[Shadowed] = []
        self.now_s = 0.0
        self.is_under_way = False  # the check after this very rule counts as no step

    def configured(self, config: KVMemoryConfig, num_spare_slots: int) -> KVMemoryConfig:
        return config

    def is_open_for_more(self) -> bool:
        return len(self.live) < self.max_live

    def resting(self) -> list[Shadowed]:
        return [sequence for sequence in self.live if not sequence.table.is_in_flight]

    @precondition(is_open_for_more)
    @rule(space=PICK, blocks=st.lists(TOKEN, max_size=5), tail=st.lists(TOKEN, min_size=1, max_size=5))
    def begin(self, space: int, blocks: list[int], tail: list[int]) -> None:
        """A few blocks of one repeated token, then a tail: prefixes that others are likely to have, too."""
        tokens = [token for token in blocks for _ in range(self.size)] + tail
        self.live.append(self.shadow.begin(self.spaces[space % 2], tokens))

    @precondition(lambda self: self.resting())
    @rule(pick=PICK, token=TOKEN)
    def append(self, pick: int, token: int) -> None:
        sequence = self.resting()[pick % len(self.resting())]
        sequence.append(token)

    @precondition(lambda self: self.resting())
    @rule(
        pick=PICK,
        num_tokens=st.integers(1, 40),
        drafts=st.lists(TOKEN, max_size=6),
        keep=st.sampled_from(StateCheckpoint),
    )
    def reserve(self, pick: int, num_tokens: int, drafts: list[int], keep: StateCheckpoint) -> None:
        sequence = self.resting()[pick % len(self.resting())]
        if sequence.num_uncomputed:
            num_tokens = min(num_tokens, sequence.num_uncomputed)
            has_state = self.shadow.config.num_slots > 0
            is_on_border = (sequence.table.num_computed + num_tokens) % self.size == 0
            may_draft = num_tokens == sequence.num_uncomputed and not has_state
            self.shadow.reserve(
                sequence, num_tokens, drafts if may_draft else [], keep if has_state and is_on_border else None
            )

    @precondition(lambda self: self.shadow.in_flight)
    @rule(pick=PICK, short=st.integers(0, 6), dies=st.booleans())
    def finish_row(self, pick: int, short: int, dies: bool) -> None:
        """A row returns: whole, without its last few tokens (drafts, it may be), or with nothing at all."""
        sequence = self.shadow.in_flight[pick % len(self.shadow.in_flight)]
        num_tokens = sequence.table.num_reserved - sequence.table.num_computed
        self.shadow.finish_row(sequence, max(0, num_tokens - short))
        if short and dies:
            self.shadow.release(sequence)
            self.live.remove(sequence)

    @precondition(lambda self: self.resting())
    @rule(pick=PICK, tokens=st.lists(TOKEN, min_size=1, max_size=20))
    def replace_uncomputed(self, pick: int, tokens: list[int]) -> None:
        self.resting()[pick % len(self.resting())].replace_uncomputed(tokens)

    @precondition(lambda self: self.resting())
    @rule(pick=PICK)
    def match_again(self, pick: int) -> None:
        self.shadow.match(self.resting()[pick % len(self.resting())])

    @precondition(lambda self: self.resting() and self.is_open_for_more())
    @rule(pick=PICK, at=PICK)
    def fork(self, pick: int, at: int) -> None:
        sequence = self.resting()[pick % len(self.resting())]
        num_computed = sequence.table.num_computed
        if self.shadow.config.num_slots:
            self.live.append(self.shadow.fork(sequence, num_computed if at % 8 else 0))
        else:
            self.live.append(self.shadow.fork(sequence, at % (num_computed + 1)))

    @precondition(lambda self: self.resting())
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        sequence = self.resting()[pick % len(self.resting())]
        self.shadow.release(sequence)
        self.live.remove(sequence)

    @rule(space=PICK, token=TOKEN, num_blocks=st.integers(0, 4), seconds=st.floats(0, 16))
    def pin(self, space: int, token: int, num_blocks: int, seconds: float) -> None:
        tokens, end_s = [token] * (num_blocks * self.size), self.now_s + seconds
        self.shadow.pins.append(self.shadow.memory.pin(self.spaces[space % 2], tokens, end_s, f"tenant{space % 3}"))

    @precondition(lambda self: self.shadow.pins)
    @rule()
    def yield_pin(self) -> None:
        self.shadow.memory.yield_pin()

    @precondition(lambda self: self.shadow.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        self.shadow.memory.unpin(self.shadow.pins[pick % len(self.shadow.pins)])

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.shadow.memory.advance(self.now_s)

    @rule(num_blocks=st.integers(0, 8))
    def evict(self, num_blocks: int) -> None:
        self.shadow.memory.evict(num_blocks)

    @rule()
    def clear(self) -> None:
        self.shadow.memory.clear()

    @invariant()
    def every_promise_holds(self) -> None:
        KVMemoryMachine.num_steps += self.is_under_way
        self.is_under_way = True
        self.shadow.verify_all()

    def teardown(self) -> None:
        if not hasattr(self, "shadow"):
            return
        self.shadow.finish_step()
        for sequence in self.live:
            self.shadow.release(sequence)
        self.shadow.memory.advance(self.now_s + 1e6)
        invariants.check_at_rest(self.shadow.memory)
        assert not self.shadow.memory.pool.num_referenced


class HybridMemoryMachine(KVMemoryMachine):
    """The same with state slots: for at most six sequences, and none to nine to keep states in."""

    max_live: ClassVar[int] = 6

    def configured(self, config: KVMemoryConfig, num_spare_slots: int) -> KVMemoryConfig:
        return replace(config, num_slots=self.max_live + num_spare_slots, num_running_slots=self.max_live)
