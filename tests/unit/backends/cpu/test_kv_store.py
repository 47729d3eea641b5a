"""Blocks of keys and values in every type: how many bytes they have, and that they come back as they were."""

import numpy as np
import pytest

from quire.backends.cpu.kv_store import STORED_AS, KVStore, block_bytes
from quire.backends.host.block_store import LayerShape
from quire.config import ModelSettings
from quire.core.step import BlockCopy

SHAPES = (LayerShape(2, 32, 40), LayerShape(3, 48, 48))


@pytest.mark.parametrize("dtype", STORED_AS)
def test_a_block_comes_back_as_it_was_in_another_place(dtype: str) -> None:
    store, random = KVStore(SHAPES, 3, 16, dtype), np.random.default_rng(1)
    content = random.bytes(store.num_block_bytes)
    store.write_blocks([1], [content])
    store.copy([BlockCopy(1, 3)])
    assert store.read_blocks([3, 2]) == [content, bytes(len(content))]


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4 * 432), ("bfloat16", 2 * 432), ("int8", 432 + 4 * 10)])
def test_a_token_takes_its_numbers_and_its_scales(dtype: str, num_bytes: int) -> None:
    assert block_bytes(SHAPES, 16, dtype) == 16 * num_bytes
    store = KVStore(SHAPES, 1, 16, dtype)
    assert sum(array[1].nbytes for array in (*store.keys, *store.values)) == 16 * num_bytes


@pytest.mark.parametrize(
    ("types", "held"), [({"F32"}, "float32"), ({"F32", "BF16"}, "bfloat16"), ({"Q4_K", "Q6_K"}, "bfloat16")]
)
def test_auto_is_bfloat16_but_for_models_in_float32(types: set[str], held: str) -> None:
    assert ModelSettings(kv_dtype="auto").with_kv_dtype(types).kv_dtype == held
    assert ModelSettings(kv_dtype="int8").with_kv_dtype(types).kv_dtype == "int8"
    assert ModelSettings(dtype="float32").with_kv_dtype(types).kv_dtype == "float32"
