"""The torch runner keeps the contract, bit for bit, on every kind of attention it knows."""

import pytest

from quire.backends.conformance import CHECKS, check_all
from tests.support import architectures
from tests.support.models import runners_of

SETTINGS = {
    "memory_bytes": 8 << 30, "block_size": 8, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "gemma2"])
def test_the_kit_passes_in_plain_torch(name: str) -> None:
    done = check_all(runners_of(architectures.directory(name), **SETTINGS))
    assert len(done) == len(CHECKS)


@pytest.mark.parametrize("name", architectures.NATIVE)
def test_the_kit_passes_with_native_kernels(name: str) -> None:
    done = check_all(runners_of(architectures.directory(name), **{**SETTINGS, "block_size": 16}))
    assert len(done) == len(CHECKS)


def test_the_kit_passes_with_keys_and_values_in_bfloat16() -> None:
    settings = {**SETTINGS, "block_size": 16, "kv_dtype": "bfloat16"}
    done = check_all(runners_of(architectures.directory("llama-native"), **settings))
    assert len(done) == len(CHECKS)


@pytest.mark.parametrize("name", architectures.NATIVE)
def test_the_kit_passes_with_weights_in_bfloat16(name: str) -> None:
    settings = {**SETTINGS, "block_size": 16, "dtype": "bfloat16"}
    done = check_all(runners_of(architectures.directory(name), **settings))
    assert len(done) == len(CHECKS)
