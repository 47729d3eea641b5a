"""The paged store on MLX against plain arrays: where rows land, what blocks are as bytes, and what a step takes."""

import gc
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.backends.host.block_store import LayerShape
from quire.backends.mlx.kv_store import KVStore
from quire.backends.mlx.runner import MlxRunner
from quire.config.model_settings import KVDtype
from quire.core.request import ResolvedSampling
from quire.core.step import BlockCopy, Sampling, StepPlan, WorkItem
from quire.errors import InvariantError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import kept_for_this_file
from tests.support.models.mlx_models import SETTINGS, made_by_mlx
from tests.support.models.models import load_runner

SHAPES = (LayerShape(2, 3, 5), LayerShape(1, 4, 4))
"""Key and value sizes that differ, and layers that differ."""
NUM_BLOCKS, BLOCK_SIZE = 5, 3
DTYPES: tuple[KVDtype, ...] = ("float32", "bfloat16", "float16")
NOISE_BYTES = 500_000
"""By which the same step differs from run to run; the keys of one layer are 10 MB in the large pool."""
Numbers = NDArray[np.float32]


def as_bytes(numbers: Numbers, dtype: KVDtype) -> bytes:
    """Numbers that every type holds exactly, as the store's type writes them."""
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return numbers.astype(dtype).tobytes()


class PlainStore:
    """The same in numpy."""

    def __init__(self) -> None:
        places = (NUM_BLOCKS + 1, BLOCK_SIZE)
        self.arrays = [
            np.zeros((*places, shape.num_kv_heads, size), np.float32)
            for shape in SHAPES
            for size in (shape.key_size, shape.value_size)
        ]

    def write(self, layer: int, places: Sequence[tuple[int, int]], keys: Numbers, values: Numbers) -> None:
        for row, place in enumerate(places):
            self.arrays[2 * layer][place], self.arrays[2 * layer + 1][place] = keys[row], values[row]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for src, dst in copies:
            for array in self.arrays:
                array[dst] = array[src]

    def block(self, block: int, dtype: KVDtype) -> bytes:
        return b"".join(as_bytes(array[block], dtype) for array in self.arrays)


def rows_of(layer: int, num_rows: int, salt: int) -> tuple[Numbers, Numbers]:
    """Keys and values of some rows: whole numbers, which all types hold."""
    dice, shape = np.random.default_rng(salt), SHAPES[layer]
    sizes = shape.key_size, shape.value_size
    keys, values = (dice.integers(-99, 99, (num_rows, shape.num_kv_heads, size)) for size in sizes)
    return keys.astype(np.float32), values.astype(np.float32)


def put(store: KVStore, layer: int, places: Sequence[tuple[int, int]], keys: Numbers, values: Numbers) -> list[bool]:
    """Write rows; which of them are finite."""
    blocks, slots = (mx.array([place[at] for place in places]) for at in (0, 1))
    found = np.array(store.write(layer, (blocks, slots), mx.array(keys), mx.array(values)))
    return [bool(one) for one in found]


def all_places() -> list[tuple[int, int]]:
    return [(block, slot) for block in range(1, NUM_BLOCKS + 1) for slot in range(BLOCK_SIZE)]


blocks = st.integers(1, NUM_BLOCKS)
writes = st.tuples(
    st.integers(0, len(SHAPES) - 1), st.lists(st.sampled_from(all_places()), min_size=1, unique=True), st.integers(0)
)
copies = st.lists(st.builds(BlockCopy, blocks, blocks), max_size=4)
carried = st.lists(st.tuples(blocks, blocks), max_size=3, unique_by=lambda pair: pair[1])
steps = st.lists(st.tuples(st.sampled_from(["write", "copy", "carry"]), writes, copies, carried), max_size=6)


@settings(max_examples=40)
@given(steps, st.sampled_from(DTYPES))
def test_whatever_is_written_copied_and_carried_lies_where_it_lies_in_plain_arrays(
    todo: list[tuple[str, tuple[int, list[tuple[int, int]], int], list[BlockCopy], list[tuple[int, int]]]],
    dtype: KVDtype,
) -> None:
    store, plain = KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, dtype), PlainStore()
    for kind, (layer, places, salt), copied, moved in todo:
        if kind == "write":
            keys, values = rows_of(layer, len(places), salt)
            assert put(store, layer, places, keys, values) == [True] * len(places)
            plain.write(layer, places, keys, values)
        elif kind == "copy":
            store.copy(copied)
            plain.copy(copied)
        else:
            sources, targets = [src for src, _ in moved], [dst for _, dst in moved]
            store.write_blocks(targets, store.read_blocks(sources))
            held = [[array[src].copy() for array in plain.arrays] for src in sources]
            for dst, contents in zip(targets, held, strict=True):
                for array, content in zip(plain.arrays, contents, strict=True):
                    array[dst] = content
    every = range(NUM_BLOCKS + 1)
    assert store.read_blocks(every) == [plain.block(block, dtype) for block in every]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_goes_out_as_bytes_and_back_into_another(dtype: KVDtype) -> None:
    store, other = (KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, dtype) for _ in range(2))
    for layer in range(len(SHAPES)):
        put(store, layer, all_places(), *rows_of(layer, len(all_places()), layer))
    data = store.read_blocks([2, 4])
    assert [len(content) for content in data] == [store.num_block_bytes] * 2
    other.write_blocks([5, 1], data)
    assert other.read_blocks([5, 1]) == data
    assert not any(b"".join(other.read_blocks([0, 2, 3, 4])))


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_no_block(change: int) -> None:
    store = KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, "float32")
    with raises_code(InvariantError, "invariant_broken"):
        store.write_blocks([1], [bytes(store.num_block_bytes + change)])


def test_a_later_copy_reads_what_an_earlier_one_wrote() -> None:
    store = KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, "float32")
    put(store, 0, all_places(), *rows_of(0, len(all_places()), 3))
    first, second = store.read_blocks([1, 2])
    store.copy([BlockCopy(1, 3), BlockCopy(2, 1), BlockCopy(3, 4), BlockCopy(1, 5)])
    assert store.read_blocks([1, 2, 3, 4, 5]) == [second, second, first, first, second]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from(DTYPES),
)
@settings(max_examples=30)
def test_what_is_not_finite_is_written_as_zeros_and_told_by_row(
    are_spoilt: list[tuple[bool, bool]], number: float, dtype: KVDtype
) -> None:
    store, plain = KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, dtype), PlainStore()
    places = all_places()[: len(are_spoilt)]
    keys, values = rows_of(0, len(places), 7)
    cleaned = keys.copy(), values.copy()
    for row, spoilt in enumerate(are_spoilt):
        for array, zeroed, is_spoilt in zip((keys, values), cleaned, spoilt, strict=True):
            if is_spoilt:
                array[row, 1, 2], zeroed[row, 1, 2] = number, 0.0
    assert put(store, 0, places, keys, values) == [not any(spoilt) for spoilt in are_spoilt]
    plain.write(0, places, *cleaned)
    every = range(NUM_BLOCKS + 1)
    assert store.read_blocks(every) == [plain.block(block, dtype) for block in every]


def test_a_number_that_the_stores_type_cannot_hold_is_not_finite() -> None:
    store = KVStore(SHAPES, NUM_BLOCKS, BLOCK_SIZE, "float16")
    keys, values = rows_of(0, 2, 1)
    keys[1, 0, 0] = 1e6
    assert put(store, 0, [(1, 0), (1, 1)], keys, values) == [True, False]
    assert np.isfinite(np.array(store.keys[0])).all()


@kept_for_this_file
def loaded() -> MlxRunner:
    runner = load_runner(made_by_mlx("llama"), **{**SETTINGS, "max_sequence_tokens": 128, "max_step_tokens": 64})
    assert isinstance(runner, MlxRunner)
    return runner


def over_a_pool_of(num_blocks: int) -> MlxRunner:
    """The same model over so many blocks of 4 tokens."""
    (model, store), owner = loaded()._opened(), loaded()._mlx_thread
    made = owner.call(lambda: KVStore(model.kv_shapes, num_blocks, 4, store.dtype))
    return MlxRunner(owner, model, made, replace(loaded().capacity, num_blocks=num_blocks, block_size=4))


def most_held_by(plan: StepPlan, num_blocks: int) -> int:
    """The most that MLX holds in a step, beside the model and a pool of so many blocks."""
    gc.collect()  # earlier pools
    runner = over_a_pool_of(num_blocks)
    before = mx.get_active_memory()
    runner.run(plan)  # what is made once
    held = []
    for _ in range(3):
        mx.reset_peak_memory()
        runner.run(plan)
        held.append(mx.get_peak_memory() - before)
    return min(held)


@pytest.mark.parametrize(
    ("num_fed", "copies"),
    [(1, ()), (30, ()), (1, (BlockCopy(9, 10), BlockCopy(10, 11)))],
    ids=["decode", "prompt", "copy"],
)
def test_a_step_takes_as_much_memory_whatever_the_pool(num_fed: int, copies: tuple[BlockCopy, ...]) -> None:
    sampling = Sampling(ResolvedSampling(temperature=0.0), 0, 0, num_fed, 1, None)
    plan = StepPlan(1, copies, (WorkItem(1, (7,) * num_fed, 0, tuple(range(1, 9)), sampling),))
    small, large = most_held_by(plan, 100), most_held_by(plan, 10_000)
    assert large <= 1.2 * small + NOISE_BYTES, f"{large:,} bytes with 10,000 blocks, {small:,} with 100"


def test_a_step_that_is_done_holds_nothing_even_if_no_garbage_is_collected() -> None:
    runner, plan = over_a_pool_of(100), StepPlan(1, (), (WorkItem(1, (7,) * 30, 0, tuple(range(1, 9))),))
    runner.run(plan)
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        for _ in range(5):
            runner.run(plan)
        assert mx.get_active_memory() - before < 1000
    finally:
        gc.enable()


def test_no_step_touches_the_null_block() -> None:
    runner = over_a_pool_of(100)
    for first, num_fed in ((0, 30), (30, 1)):
        runner.run(
            StepPlan(1, (), (WorkItem(1, (7,) * num_fed, first, tuple(range(1, 9))), WorkItem(2, (5,), 0, (20,))))
        )
    assert not any(runner.read_blocks([0])[0])
    assert any(runner.read_blocks([20])[0])
