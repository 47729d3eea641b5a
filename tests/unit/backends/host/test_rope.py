"""Rotary positions and windows: those of transformers, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.backends.host.rope import Rope, read_rope
from quire.checkpoints.families.layer_rules import RopeRule, rope_parameters, windows_of
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.architectures import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

ROPES = [
    LINEAR_ROPE,
    LLAMA3_ROPE,
    YARN_ROPE,
    {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN_ROPE, "attention_factor": 1.5, "beta_fast": 20, "truncate": False},
]


def rope_of(config: dict[str, Any], size: int) -> Rope:
    return read_rope(RopeRule(size, size, tuple(rope_parameters(config).items())))


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    make: Any = CONFIG_MAPPING["llama"]
    config = make(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    made = rope_of({"rope_parameters": rope}, 16)
    assert np.allclose(made.frequencies, expected.numpy(), rtol=1e-6)
    assert made.scaling == pytest.approx(scaling)


def test_old_configs_spell_rope_otherwise() -> None:
    old = {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}
    assert np.array_equal(rope_of(old, 8).frequencies, rope_of(new, 8).frequencies)
    assert rope_parameters({})["rope_type"] == "default"


@pytest.mark.parametrize(("rope", "code"), [
    ({"rope_type": "dynamic", "factor": 2.0}, "unsupported_rope"), ({"rope_type": "longrope"}, "unsupported_rope"),
    ({"rope_type": "linear"}, "invalid_rope"), ({"rope_type": "linear", "factor": 0.0}, "invalid_rope"),
    ({"rope_type": "yarn", "factor": "x"}, "invalid_rope"), ({"rope_theta": "x"}, "invalid_rope"),
])  # fmt: skip
def test_positions_that_cannot_be_cached_or_read_are_refused(rope: dict[str, Any], code: str) -> None:
    with raises_code(CheckpointError, code):
        rope_of({"rope_parameters": rope}, 16)


def test_windows_come_from_layer_kinds_or_from_older_words() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert windows_of({"sliding_window": 7, "layer_types": kinds}, 2) == (None, 7)
    assert windows_of({"sliding_window": 7, "model_type": "mistral"}, 2) == (7, 7)
    assert windows_of({"sliding_window": 7, "model_type": "qwen2"}, 2) == (None, None)
    older = {"sliding_window": 7, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    assert windows_of(older, 3) == (None, 7, 7)
    assert windows_of({}, 2) == (None, None)


@pytest.mark.parametrize("fields", [
    {"layer_types": ["linear_attention"]}, {"layer_types": []}, {"layer_types": "full"}, {"sliding_window": 0},
    {"sliding_window": "many"}, {"layer_types": [3]},
])  # fmt: skip
def test_layers_that_cannot_share_a_prefix_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        windows_of(fields, 1)
