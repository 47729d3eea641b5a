"""Details of one block, for the dashboard. Walks the open tables and the block's ancestors."""

from collections.abc import Iterable
from itertools import islice

from quire.core.inspect.pool_map import state_of
from quire.core.inspect.snapshots import MAX_CHAIN, MAX_CHILDREN, BlockFacts
from quire.core.memory.block_table import BlockTable
from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.sequence import Sequence


def facts_of_block(memory: KVMemory, running: Iterable[Sequence], block: int, now_s: float) -> BlockFacts | None:
    """Collect the details of a block; None if the block does not exist."""
    pool, tree = memory.pool, memory.tree
    if not 1 <= block <= pool.num_blocks:
        return None
    users = [sequence for sequence in running if sequence.table is not None and block in sequence.table.blocks]
    table = users[0].table if users else _pin_table_with(memory, block)
    is_named = bool(tree.parent_of(block))
    chain, root = _chain(memory, block, table)
    namespace = None if root is None else tree.namespace_of(root)
    return BlockFacts(
        block_id=block,
        state=state_of(pool, memory.pins, memory.tables.values(), block),
        ref_count=pool.ref_count[block],
        pin_count=memory.pins.pin_count[block],
        digest=tree.digest_of(block).hex() if is_named else None,
        cache_group=None if namespace is None else namespace.cache_group,
        tenant=users[0].request.tenant if users else None,
        age_s=max(0.0, now_s - memory.names.named_at_s[block]) if is_named else None,
        num_tokens=_num_tokens(memory.config.block_size, block, table, is_named=is_named),
        chain=tuple(chain),
        children=tuple(islice(tree.children(block), MAX_CHILDREN)) if is_named else (),
        requests=tuple(dict.fromkeys(sequence.request.request_id for sequence in users)),
    )


def _pin_table_with(memory: KVMemory, block: int) -> BlockTable | None:
    return next((table for table in memory.pins.tables.values() if block in table.blocks), None)


def _chain(memory: KVMemory, block: int, table: BlockTable | None) -> tuple[list[int], int | None]:
    """Return the blocks from the prompt's start to this block, and their root; an unnamed block is only in `table`."""
    if not memory.tree.parent_of(block):
        if table is None:
            return [], None
        index = table.blocks.index(block)
        return table.blocks[max(0, index + 1 - MAX_CHAIN) : index + 1], table.root
    chain, node = [block], memory.tree.parent_of(block)
    while node > 0:
        chain.append(node)
        node = memory.tree.parent_of(node)
    return chain[MAX_CHAIN - 1 :: -1], node


def _num_tokens(block_size: int, block: int, table: BlockTable | None, *, is_named: bool) -> int:
    if is_named:
        return block_size
    if table is None:
        return 0
    return max(0, min(block_size, table.num_computed - table.blocks.index(block) * block_size))
