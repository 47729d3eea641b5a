"""What the KV memory shows of itself: its counters and shares, and one block."""

from collections.abc import Collection
from dataclasses import dataclass

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.block_table import BlockTable, unpack_tokens
from quire.core.memory.kv_config import Block, MemoryStats
from quire.core.memory.pins import Pins
from quire.core.memory.prefix_tree import PrefixTree
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
    pool: BlockPool,
    slots: StateSlots,
    pins: Pins,
    tables: Collection[BlockTable],
    counters: MemoryCounters,
    block_size: int,
) -> MemoryStats:
    """Walks the open tables, not the pool."""
    num_slots = pool.num_referenced * block_size
    return MemoryStats(
        num_blocks=pool.num_blocks,
        num_referenced_blocks=pool.num_referenced,
        num_cached_blocks=pool.num_cached,
        num_blank_blocks=pool.num_blank,
        num_named_blocks=pool.num_named,
        num_pinned_blocks=pins.num_pinned_blocks,
        num_open_tables=len(tables),
        query_tokens=counters.query_tokens,
        hit_tokens=counters.hit_tokens,
        num_evictions=counters.num_evictions,
        num_block_copies=counters.num_block_copies,
        num_collisions=counters.num_collisions,
        num_slots=slots.num_slots,
        num_cached_slots=slots.num_cached,
        num_slot_evictions=slots.num_evictions,
        usage=pool.num_referenced / pool.num_blocks,
        fragmentation=_num_empty_slots(pool, tables, block_size) / num_slots if num_slots else 0.0,
    )


def block_view(block_id: int, pool: BlockPool, pins: Pins, tree: PrefixTree) -> Block:
    """The facts of one block."""
    parent = tree.parent_of(block_id)
    return Block(
        block_id=block_id,
        ref_count=pool.ref_count[block_id],
        is_pinned=pins.pin_count[block_id] > 0,
        digest=tree.digest_of(block_id) if parent else None,
        token_ids=unpack_tokens(tree.tokens_of(block_id)) if parent else (),
        parent_id=parent if parent > 0 else None,
    )


def _num_empty_slots(pool: BlockPool, tables: Collection[BlockTable], block_size: int) -> int:
    """Slots of referenced blocks that hold no token: only the blocks a sequence has not filled yet have any."""
    named, num_filled = pool.named, dict[int, int]()
    for table in tables:
        for index in range(table.num_computed // block_size, len(table.blocks)):
            block, filled = table.blocks[index], max(0, table.num_computed - index * block_size)
            num_filled[block] = max(block_size * named[block], filled, num_filled.get(block, 0))
    return sum(block_size - filled for filled in num_filled.values())
