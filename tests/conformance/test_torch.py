"""The torch runner keeps the contract, bit for bit, on every kind of attention it knows."""

import pytest

from quire.backends.conformance.contract import CHECKS, check_all
from tests.support.models import architectures
from tests.support.models.models import runners_of

SETTINGS = {
    "memory_bytes": 8 << 30, "block_size": 8, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
    "backend": "torch",
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "qwen3", "gemma2"])
def test_the_kit_passes_through_the_modules_of_transformers(name: str) -> None:
    done = check_all(runners_of(architectures.directory(name), **SETTINGS))
    assert len(done) == len(CHECKS)
