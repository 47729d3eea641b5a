"""The torch runner keeps the contract, bit for bit, on every kind of attention it knows."""

from functools import partial

import pytest

from quire.backends.conformance import CHECKS, check_all
from tests.support import architectures
from tests.support.models import load_runner

SETTINGS = {
    "memory_bytes": 8 << 30, "block_size": 8, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-windows", "qwen3", "gemma2"])
def test_the_kit_passes(name: str) -> None:
    done = check_all(partial(load_runner, architectures.directory(name), **SETTINGS))
    assert len(done) == len(CHECKS)
