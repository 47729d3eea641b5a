"""Which layers keep a state, how large it is, which tensors they have in both kinds of files, and what is refused."""

import re
from math import inf
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.families import expected_shapes, read_shape
from quire.checkpoints.families.decoder_shape import LAYOUT, TILED
from quire.checkpoints.families.family import RecurrentKind
from quire.checkpoints.families.recurrent import COLUMNS, MAX_KEY_SIZE, MAX_TAPS, RecurrentShape
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.plain_hybrids import CONFIGS

NATIVE = Path(__file__).parents[3] / "native" / "layers" / "recurrent.hpp"
DELTA, SPACE, CONVOLUTION = CONFIGS["delta"], CONFIGS["ssm"], CONFIGS["convolution of kernel size 3"]
NEXT = CONFIGS["delta, inputs grouped by key head"]


def without(config: dict[str, Any], *names: str, **others: Any) -> dict[str, Any]:
    return {**{key: value for key, value in config.items() if key not in names}, **others}


def pattern(config: dict[str, Any]) -> str:
    """A letter for each layer: s keeps a state, a attends."""
    return "".join("a" if layer.recurrent is None else "s" for layer in read_shape(config).layers)


def layer_of(config: dict[str, Any]) -> RecurrentShape:
    found = read_shape(config).recurrent
    assert found is not None
    return found


def own_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the first layer, without norms before and behind and the dense part."""
    place = "model.layers.0."
    return {
        name.removeprefix(place): shape
        for name, shape in expected_shapes(read_shape(config)).items()
        if name.startswith((f"{place}linear_attn.", f"{place}mamba.", f"{place}conv."))
    }


@pytest.mark.parametrize(("config", "layers"), [
    (DELTA, "sas"),
    (without(DELTA, "layer_types", num_hidden_layers=9), "sssasssas"),
    (without(DELTA, "layer_types", num_hidden_layers=5, full_attention_interval=2), "sasas"),
    (without(CONVOLUTION, "layer_types", num_hidden_layers=4, full_attn_idxs=[1, 3]), "sasa"),
    (without(SPACE, "layer_types", layers_block_type=["attention", "mamba", "mamba"]), "ass"),
    (without(SPACE, "layer_types"), "aaa"),
    ({**SPACE, "layer_types": ["attention"] * 3}, "aaa"),
])  # fmt: skip
def test_a_config_says_which_layers_keep_a_state(config: dict[str, Any], layers: str) -> None:
    assert pattern(config) == layers
    assert read_shape(config).num_recurrent == layers.count("s")


def test_a_layer_that_keeps_a_state_has_no_keys_and_values() -> None:
    assert [layer.has_kv for layer in read_shape(DELTA).layers] == [False, True, False]


def test_sizes_of_a_gated_delta_net() -> None:
    layer = layer_of(DELTA)
    assert layer.kind is RecurrentKind.DELTA
    assert (layer.num_channels, layer.out_size, layer.norm_span) == (2 * 48 + 240, 240, 40)
    assert layer.in_size == 336 + 240 + 6 + 6
    assert layer.history_size == 3 * 336
    assert layer.state_size == 6 * 64 * 24  # the last of 40 columns are padded to 64
    assert read_shape(DELTA).state_bytes == 4 * 2 * (layer.history_size + layer.state_size)
    assert not layer.is_tiled
    assert layer_of({**DELTA, TILED: True}).is_tiled


def test_sizes_of_a_state_space() -> None:
    layer = layer_of(SPACE)
    assert layer.kind is RecurrentKind.STATE_SPACE
    assert (layer.num_channels, layer.out_size, layer.norm_span) == (88 + 2 * 2 * 20, 88, 44)
    assert layer.in_size == 88 + 168 + 4
    assert (layer.value_size, layer.state_size) == (22, 4 * 32 * 20)
    assert (layer.has_bias, layer.has_tap_bias) == (False, True)
    assert layer_of({**SPACE, "mamba_d_head": 22}) == layer


@pytest.mark.parametrize(("limits", "steps"), [
    (None, (0.0, inf)), ([0.5, 2], (0.5, 2.0)), ([0.0, {"__float__": "Infinity"}], (0.0, inf)),
])  # fmt: skip
def test_steps_have_the_limits_that_a_config_names(limits: Any, steps: tuple[float, float]) -> None:
    layer = layer_of({**SPACE, "time_step_limit": limits})
    assert (layer.min_step, layer.max_step) == steps


def test_sizes_of_a_short_convolution() -> None:
    layer = layer_of(CONVOLUTION)
    assert layer.kind is RecurrentKind.CONVOLUTION
    assert (layer.num_channels, layer.out_size, layer.in_size) == (44, 44, 132)
    assert (layer.history_size, layer.state_size) == (2 * 44, 0)
    assert (layer.has_bias, layer.has_tap_bias) == (True, True)
    assert read_shape({**DELTA, "model_type": "qwen3", "layer_types": ["full_attention"] * 3}).state_bytes == 0


def test_limits_are_those_of_the_kernels() -> None:
    text = NATIVE.read_text()
    found = {name: int(size) for name, size in re.findall(r"\b(k\w+) = (\d+)", text)}
    assert (found["kColumns"], found["kMaxTaps"], found["kMaxKeySize"]) == (COLUMNS, MAX_TAPS, MAX_KEY_SIZE)


@pytest.mark.parametrize(("config", "code"), [
    ({**DELTA, "linear_conv_kernel_dim": 1}, "unsupported_convolution"),
    ({**CONVOLUTION, "conv_L_cache": 9}, "unsupported_convolution"),
    ({**DELTA, "linear_num_value_heads": 5}, "value_heads_not_divisible"),
    ({**SPACE, "mamba_n_groups": 8}, "value_heads_not_divisible"),
    ({**DELTA, "linear_key_head_dim": 23}, "unsupported_state_rows"),
    ({**SPACE, "mamba_d_state": 514}, "unsupported_state_rows"),
    ({**SPACE, "mamba_d_head": 21}, "mamba_sizes_differ"),
    ({**SPACE, "mamba_n_heads": 3}, "mamba_sizes_differ"),
    ({**SPACE, "mamba_d_head": "wide"}, "invalid_mamba_d_head"),
    ({**SPACE, "mamba_conv_bias": 1}, "invalid_mamba_conv_bias"),
    ({**DELTA, "linear_num_key_heads": 0}, "invalid_linear_num_key_heads"),
    ({**without(DELTA, "layer_types"), "full_attention_interval": 0}, "invalid_full_attention_interval"),
    ({**CONVOLUTION, "layer_types": ["conv"] * 3}, "no_attention_layer"),
    ({**DELTA, "layer_types": ["full_attention"]}, "invalid_layer_types"),
    ({**DELTA, "layer_types": [1, 2, 3]}, "invalid_layer_types"),
    ({**DELTA, "layer_types": ["moe", "full_attention", "mlp"]}, "unsupported_layer_kind"),
    ({**DELTA, "model_type": "qwen3"}, "unsupported_layer_kind"),
    ({**DELTA, "sliding_window": 0}, "invalid_sliding_window"),
    ({**DELTA, "partial_rotary_factor": 0.1}, "odd_rotated_values"),
    ({**DELTA, "head_dim": 33}, "unsupported_head_size"),
])  # fmt: skip
def test_a_config_that_cannot_be_is_refused(config: dict[str, Any], code: str) -> None:
    with raises_code(CheckpointError, code):
        read_shape(config)


def test_heads_turn_only_where_the_family_says_how() -> None:
    assert [layer.rope.num_rotated for layer in read_shape(SPACE).layers] == [0, 0, 0]
    assert read_shape({**SPACE, "position_embedding_type": "rope"}).layers[1].rope.num_rotated == 32
    assert read_shape({**SPACE, "position_embedding_type": "nope"}).layers[1].rope.num_rotated == 0
    assert read_shape(DELTA).layers[1].rope.num_rotated == 8


def test_tensors_of_a_gated_delta_net() -> None:
    vectors = {"linear_attn.A_log": (6,), "linear_attn.dt_bias": (6,), "linear_attn.norm.weight": (40,)}
    products = {
        "linear_attn.in_proj_qkv.weight": (336, 44), "linear_attn.in_proj_z.weight": (240, 44),
        "linear_attn.in_proj_b.weight": (6, 44), "linear_attn.in_proj_a.weight": (6, 44),
        "linear_attn.out_proj.weight": (44, 240),
    }  # fmt: skip
    assert own_tensors(DELTA) == {**vectors, **products, "linear_attn.conv1d.weight": (336, 1, 4)}
    assert own_tensors({**DELTA, LAYOUT: "gguf"}) == {**vectors, **products, "linear_attn.conv1d.weight": (336, 4)}


def test_inputs_by_key_heads_are_fewer_tensors_and_in_gguf_files_not_quite_so_few() -> None:
    inputs = {name: shape for name, shape in own_tensors(NEXT).items() if "in_proj" in name}
    assert inputs == {"linear_attn.in_proj_qkvz.weight": (192 + 2 * 480, 44), "linear_attn.in_proj_ba.weight": (24, 44)}
    inputs = {name: shape for name, shape in own_tensors({**NEXT, LAYOUT: "gguf"}).items() if "in_proj" in name}
    assert inputs == {
        "linear_attn.in_proj_qkv.weight": (672, 44), "linear_attn.in_proj_z.weight": (480, 44),
        "linear_attn.in_proj_ba.weight": (24, 44),
    }  # fmt: skip


def test_tensors_of_a_state_space() -> None:
    same = {
        "mamba.in_proj.weight": (260, 44), "mamba.out_proj.weight": (44, 88), "mamba.conv1d.bias": (168,),
        "mamba.dt_bias": (4,),
    }  # fmt: skip
    assert own_tensors(SPACE) == {
        **same, "mamba.conv1d.weight": (168, 1, 4), "mamba.A_log": (4,), "mamba.D": (4,), "mamba.norm.weight": (88,),
    }  # fmt: skip
    assert own_tensors({**SPACE, LAYOUT: "gguf"}) == {
        **same, "mamba.conv1d.weight": (168, 4), "mamba.A_log": (4, 1), "mamba.D": (4, 1), "mamba.norm.weight": (2, 44),
    }  # fmt: skip
    biases = own_tensors({**SPACE, "mamba_proj_bias": True, "mamba_conv_bias": False})
    assert biases.keys() - own_tensors(SPACE).keys() == {"mamba.in_proj.bias", "mamba.out_proj.bias"}
    assert "mamba.conv1d.bias" not in biases


def test_tensors_of_a_short_convolution() -> None:
    plain = {"conv.in_proj.weight": (132, 44), "conv.out_proj.weight": (44, 44)}
    biases = {"conv.in_proj.bias": (132,), "conv.out_proj.bias": (44,), "conv.conv.bias": (44,)}
    assert own_tensors(CONVOLUTION) == {**plain, **biases, "conv.conv.weight": (44, 1, 3)}
    of_file = own_tensors({**CONVOLUTION, "conv_bias": False, LAYOUT: "gguf"})
    assert of_file == {**plain, "conv.conv.weight": (44, 3)}
