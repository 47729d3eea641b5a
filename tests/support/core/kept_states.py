"""Sequences on a shadowed memory with state slots, computed up to chosen borders. Blocks of four tokens."""

from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.state_slots import StateCheckpoint
from tests.support.core.shadow import Shadowed, ShadowedMemory, namespace

SPACE = namespace(block_size=4)
NUM_RUNNING = 4


def config(num_blocks: int = 16, num_kept: int = 6, pin_share: float = 1.0) -> KVMemoryConfig:
    return KVMemoryConfig(num_blocks, 4, pin_share, num_slots=NUM_RUNNING + num_kept, num_running_slots=NUM_RUNNING)


def new_shadow(num_blocks: int = 16, num_kept: int = 6, pin_share: float = 1.0) -> ShadowedMemory:
    return ShadowedMemory(config(num_blocks, num_kept, pin_share))


def go_on(
    shadow: ShadowedMemory, sequence: Shadowed, borders: list[int], keep: StateCheckpoint = StateCheckpoint.DURABLE
) -> Shadowed:
    """Compute all it knows, and keep the state at these borders."""
    for end in (*borders, len(sequence.tokens)):
        if end > sequence.table.num_computed:
            assert shadow.reserve(sequence, end - sequence.table.num_computed, keep=keep if end in borders else None)
            shadow.finish_step()
            shadow.verify_all()
    return sequence


def computed(
    shadow: ShadowedMemory, tokens: list[int], borders: list[int], keep: StateCheckpoint = StateCheckpoint.DURABLE
) -> Shadowed:
    return go_on(shadow, shadow.begin(SPACE, tokens), borders, keep)


def cached(
    shadow: ShadowedMemory, tokens: list[int], borders: list[int], keep: StateCheckpoint = StateCheckpoint.DURABLE
) -> list[int]:
    """The same, and it ends; returns its blocks."""
    sequence = computed(shadow, tokens, borders, keep)
    blocks = list(sequence.table.blocks)
    shadow.release(sequence)
    return blocks


def hit(shadow: ShadowedMemory, tokens: list[int]) -> int:
    """How much of this prompt is found."""
    sequence = shadow.begin(SPACE, tokens)
    num_tokens = sequence.table.num_computed
    shadow.release(sequence)
    return num_tokens
