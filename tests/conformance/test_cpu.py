"""The CPU runner keeps the contract, bit for bit, for every family and both types of weights. Needs no torch."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.backends.conformance.contract import CHECKS, check_all
from quire.backends.kernels import extension
from tests.support.models.models import runners_of
from tests.support.models.tiny_models import Tiny, make_directory

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

SETTINGS = {
    "memory_bytes": 8 << 30, "block_size": 16, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
    "backend": "cpu",
}  # fmt: skip
LONG = {"context_length": 1024}
MODELS = {
    "llama": Tiny(hidden=96, num_heads=3, num_kv_heads=1, num_layers=3, intermediate=160),
    "llama-untied": Tiny(hidden=64, num_heads=2, num_kv_heads=2, num_layers=2, tied=False),
    "mistral": Tiny(hidden=160, num_heads=4, num_kv_heads=4, num_layers=2, metadata={"attention.sliding_window": 45}),
    "qwen2": Tiny("qwen2", hidden=96, num_heads=2, num_kv_heads=1, num_layers=3, intermediate=64),
    "qwen3": Tiny("qwen3", hidden=128, num_heads=2, num_kv_heads=1, num_layers=2, intermediate=96, tied=False),
}


def directory(folder: Path, name: str) -> Path:
    tiny = MODELS[name]
    metadata = {f"{tiny.arch}.{key}": value for key, value in (LONG | dict(tiny.metadata)).items()}
    return make_directory(folder / name, tiny=replace(tiny, metadata=metadata))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_kit_passes(name: str, dtype: str, tmp_path: Path) -> None:
    done = check_all(runners_of(directory(tmp_path, name), **{**SETTINGS, "dtype": dtype}))
    assert len(done) == len(CHECKS)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_the_kit_passes_with_keys_and_values_in_fewer_bits(kv_dtype: str, tmp_path: Path) -> None:
    done = check_all(runners_of(directory(tmp_path, "llama"), **{**SETTINGS, "kv_dtype": kv_dtype}))
    assert len(done) == len(CHECKS)
