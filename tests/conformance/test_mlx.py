"""The MLX runner keeps the contract, bit for bit, on MLX's CPU build: windows, sinks, experts, layers that share KV."""

import pytest

from quire.backends.conformance.contract import CHECKS, check_all
from tests.support.models import mlx_models
from tests.support.models.mlx_models import made_by_mlx
from tests.support.models.models import runners_of

SETTINGS = {**mlx_models.SETTINGS, "max_sequence_tokens": 128}
"""128 blocks: the kit reads all of them."""


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "gemma4"])
def test_the_kit_passes_through_the_modules_of_mlx_lm(name: str) -> None:
    done = check_all(runners_of(made_by_mlx(name), **SETTINGS))
    assert len(done) == len(CHECKS)


def test_the_kit_passes_with_weights_in_four_bits() -> None:
    done = check_all(runners_of(made_by_mlx("llama", 4), **SETTINGS))
    assert len(done) == len(CHECKS)


def test_the_kit_passes_in_bfloat16() -> None:
    done = check_all(runners_of(made_by_mlx("llama"), **{**SETTINGS, "dtype": "bfloat16"}))
    assert len(done) == len(CHECKS)
