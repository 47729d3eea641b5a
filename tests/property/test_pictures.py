"""Pictures of the memory after any order of operations equal what an independent walk of it finds, block by block."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from quire.core.inspect import pool_map as pool_picture
from quire.core.inspect import tree_map as tree_picture
from quire.core.inspect.block_facts import facts_of_block
from quire.core.inspect.pool_map import LEVELS, STATES, PoolDrawing
from quire.core.inspect.snapshots import MAX_CELLS, CellCounts, PoolCells, TreePicture
from quire.core.inspect.tree_map import TreeDrawing
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.kv_memory import KVMemory
from quire.core.memory.pins import Pins
from tests.support.core.random_driver import RandomDriver
from tests.support.machine.machine import KVMemoryMachine


def walked_cells(memory: KVMemory) -> list[tuple[int, int]]:
    """State and count of each block, looked at one by one."""
    pool, size = memory.pool, memory.config.block_size
    written = {
        table.blocks[position // size]
        for table in memory.tables.values()
        for position in range(table.num_computed, table.num_reserved)
    }
    found = []
    for block in range(1, pool.num_blocks + 1):
        count = sum(block in table.blocks for table in memory.tables.values())
        count += sum(table.copy_source == block for table in memory.tables.values())
        pinned = any(block in table.blocks for table in memory.pins.tables.values())
        if block in written:
            state = "computing"
        elif pinned:
            state = "pinned"
        elif count > 1:
            state = "shared"
        elif count:
            state = "used"
        else:
            state = "cached" if pool.named[block] else "free"
        found.append((STATES.index(state), min(31, count)))
    return found


def drawn_cells(memory: KVMemory) -> PoolCells:
    drawing = PoolDrawing(memory.pool, memory.pins, memory.tables.values(), memory.config.block_size)
    for _ in drawing.pieces():
        pass
    return drawing.result()


def drawn_tree(memory: KVMemory, max_nodes: int = 400) -> TreePicture:
    drawing = TreeDrawing(memory.tree, memory.pool, max_nodes)
    for _ in drawing.pieces():
        pass
    return drawing.result()


def check_cells(memory: KVMemory) -> None:
    picture, expected = drawn_cells(memory), walked_cells(memory)
    assert [(cell & 7, cell >> 3) for cell in picture.cells] == expected
    counts = [sum(state == one for one, _ in expected) for state in range(6)]
    assert picture.counts == CellCounts(*counts)
    assert sum(counts) == memory.pool.num_blocks == picture.num_blocks


def check_tree(memory: KVMemory) -> None:
    size, tree = memory.config.block_size, memory.tree
    picture = drawn_tree(memory)
    assert sum(node.num_tokens for node in picture.nodes) == picture.num_tokens == memory.pool.num_named * size
    assert picture.num_nodes == len(picture.nodes)
    heads = set()
    for at, node in enumerate(picture.nodes):
        assert node.parent < at
        below = [one for one in picture.nodes if one.parent == at]
        assert node.num_tokens_below == node.num_tokens + sum(one.num_tokens_below for one in below)
        assert len(below) != 1, "a chain goes on, and is one node"
        assert node.num_references == memory.pool.ref_count[node.id]
        assert node.depth == (0 if node.parent < 0 else picture.nodes[node.parent].depth + 1)
        parent = tree.parent_of(node.id)
        assert (parent < 0) == (node.parent < 0)
        root = node.id
        while root > 0:
            root = tree.parent_of(root)
        assert tree.namespace_of(root).cache_group == node.cache_group
        heads.add(node.id)
    siblings = [list(tree.children(one)) for one in (*tree.roots(), *range(1, memory.pool.num_blocks + 1))]
    forks = {child for children in siblings if len(children) > 1 for child in children}
    assert heads == forks | {child for root in tree.roots() for child in tree.children(root)}


class PicturedMachine(KVMemoryMachine):
    """The same machine, and a picture after each operation."""

    @invariant()
    def pictures_are_true(self) -> None:
        memory = self.shadow.memory
        check_cells(memory)
        check_tree(memory)
        for block in range(1, memory.pool.num_blocks + 1, 7):
            facts = facts_of_block(memory, (), block, self.now_s)
            assert facts is not None
            assert facts.ref_count == memory.pool.ref_count[block]
            assert (facts.age_s is None) == (facts.digest is None)
            assert facts.age_s is None or 0.0 <= facts.age_s <= self.now_s
            assert facts.chain == () or facts.chain[-1] == block
            for before, after in zip(facts.chain, facts.chain[1:], strict=False):
                if facts.digest is not None:
                    assert memory.tree.parent_of(after) == before


def test_pictures_are_true_after_any_order_of_operations() -> None:
    run_state_machine_as_test(
        PicturedMachine,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_pictures_in_small_pieces_are_the_same_pictures(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RandomDriver(seed, 300, 2, check_every=500)
    driver.run(1500)
    memory = driver.shadow.memory
    check_cells(memory)
    check_tree(memory)
    cells, tree = drawn_cells(memory), drawn_tree(memory)
    monkeypatch.setattr(pool_picture, "PIECE_BLOCKS", 32)
    monkeypatch.setattr(tree_picture, "PIECE_BLOCKS", 3)
    assert drawn_cells(memory) == cells
    assert drawn_tree(memory) == tree


@pytest.mark.parametrize("seed", range(4))
def test_of_many_nodes_those_in_use_are_shown_then_the_largest_and_their_parents_with_them(seed: int) -> None:
    driver = RandomDriver(seed, 300, 2, check_every=500)
    driver.run(1500)
    memory = driver.shadow.memory
    everything = drawn_tree(memory)
    num_shown = everything.num_nodes // 2
    assert num_shown > 2
    few = drawn_tree(memory, num_shown)
    assert len(few.nodes) == num_shown
    assert (few.num_nodes, few.num_tokens) == (everything.num_nodes, everything.num_tokens)
    shown = {node.id for node in few.nodes}
    least = min((node.num_references, node.num_tokens_below) for node in few.nodes)
    for node in everything.nodes:
        if node.id in shown:
            assert node.parent < 0 or everything.nodes[node.parent].id in shown
        else:
            assert (node.num_references, node.num_tokens_below) <= least


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_cells", [150, 75, 10])
def test_a_run_of_blocks_shows_its_highest_state_and_its_largest_count(
    seed: int, max_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_picture, "MAX_CELLS", max_cells)
    monkeypatch.setattr(pool_picture, "PIECE_BLOCKS", 64)
    driver = RandomDriver(seed, 300, 2, check_every=500)
    for _ in range(5):
        driver.run(200)
        memory = driver.shadow.memory
        picture, blocks = drawn_cells(memory), walked_cells(memory)
        run = picture.blocks_per_cell
        assert len(picture.cells) == -(-300 // run) <= max_cells
        for at, cell in enumerate(picture.cells):
            own = blocks[at * run : (at + 1) * run]
            largest = max(count for _, count in own)
            assert cell & 7 == max(state for state, _ in own)
            assert cell >> 3 == max((level for level in LEVELS if level <= largest), default=0)


def test_a_large_pool_has_as_many_cells_as_there_may_be_and_counts_beyond_a_byte() -> None:
    pool = BlockPool(100_000)
    blocks = pool.allocate(40_000).blocks
    for block in blocks[::3]:
        pool.ref_count[block] = 256
    drawing = PoolDrawing(pool, Pins(100_000, 0, 1), (), 32)
    for _ in drawing.pieces():
        pass
    picture = drawing.result()
    assert (picture.blocks_per_cell, len(picture.cells)) == (4, 25_000)
    assert len(picture.cells) <= MAX_CELLS
    assert picture.counts == CellCounts(free=60_000, used=26_666, shared=13_334)
    assert picture.cells[:10_000] == bytes([3 | 31 << 3]) * 10_000
    assert picture.cells[10_000:] == bytes(15_000)
