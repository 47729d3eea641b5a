"""What the KV memory shows of itself: its counters and shares."""

from dataclasses import dataclass

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.kv_config import MemoryStats
from quire.core.memory.pins import Pins
from quire.core.memory.state_slots import StateSlots


@dataclass(slots=True)
class MemoryCounters:
    """Totals since the start."""

    query_tokens: int = 0
    hit_tokens: int = 0
    num_evictions: int = 0
    num_block_copies: int = 0
    num_collisions: int = 0


def memory_stats(
    pool: BlockPool, slots: StateSlots, pins: Pins, num_open_tables: int, counters: MemoryCounters
) -> MemoryStats:
    """The figures at this moment."""
    return MemoryStats(
        num_blocks=pool.num_blocks,
        num_referenced_blocks=pool.num_referenced,
        num_cached_blocks=pool.num_cached,
        num_blank_blocks=pool.num_blank,
        num_named_blocks=pool.num_named,
        num_pinned_blocks=pins.num_pinned_blocks,
        num_open_tables=num_open_tables,
        query_tokens=counters.query_tokens,
        hit_tokens=counters.hit_tokens,
        num_evictions=counters.num_evictions,
        num_block_copies=counters.num_block_copies,
        num_collisions=counters.num_collisions,
        num_slots=slots.num_slots,
        num_cached_slots=slots.num_cached,
        num_slot_evictions=slots.num_evictions,
        usage=pool.num_referenced / pool.num_blocks,
    )
