"""GGUF headers of hybrids: which layers keep a state, however a file says so, and what of a file is passed over.

The headers are those of tests/data, as llama.cpp's converter writes them, changed where other files differ.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from quire.checkpoints.families import read_shape
from quire.checkpoints.families.decoder_shape import LAYOUT, TILED
from quire.checkpoints.families.recurrent import RecurrentShape
from quire.checkpoints.gguf.architectures import tensor_name
from quire.checkpoints.gguf.config import Metadata, config_of
from quire.checkpoints.gguf.model import plan
from quire.checkpoints.gguf.parts import read_parts
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.tiny_models import add_field

HEADERS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "gguf_headers.json").read_text())
DELTA_NAMES, OTHER_NAMES = ("qwen3-next", "qwen3.5", "qwen3.5-moe"), ("lfm2", "lfm2-moe", "granite4", "granite4-dense")


def keys_of(name: str, **others: Any) -> dict[str, Any]:
    """A header's keys with some set; `a__b` is ARCHITECTURE.a.b, and None takes one away."""
    keys = dict(HEADERS[name]["keys"])
    for key, value in others.items():
        keys[f"{keys['general.architecture']}.{key.replace('__', '.')}"] = value
    return {key: value for key, value in keys.items() if value is not None}


def config_from(name: str, **others: Any) -> dict[str, Any]:
    shapes = {tensor: tuple(shape) for tensor, shape in HEADERS[name]["shapes"].items()}
    return config_of(Metadata(keys_of(name, **others)), shapes)


def pattern(config: dict[str, Any]) -> str:
    """A letter for each layer: s keeps a state, a attends."""
    return "".join("a" if layer.recurrent is None else "s" for layer in read_shape(config).layers)


def layer_of(config: dict[str, Any]) -> RecurrentShape:
    found = read_shape(config).recurrent
    assert found is not None
    return found


def write(path: Path, keys: dict[str, Any], tensors: dict[str, list[int]]) -> Path:
    """A file with these keys, and zeros for tensors."""
    writer = GGUFWriter(path, keys["general.architecture"])
    for key, value in keys.items():
        if key != "general.architecture":
            add_field(writer, key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", DELTA_NAMES)
def test_layers_that_a_file_names_recurrent_are(name: str) -> None:
    assert pattern(config_from(name)) == "sassa"
    assert pattern(config_from(name, attention__recurrent_layers=[False, True, True, False, True])) == "assas"


@pytest.mark.parametrize("name", DELTA_NAMES)
def test_without_names_every_so_many_layers_attend(name: str) -> None:
    assert pattern(config_from(name, attention__recurrent_layers=None)) == "sssas"
    config = config_from(name, attention__recurrent_layers=None, full_attention_interval=2)
    assert pattern(config) == "sasas"


@pytest.mark.parametrize(("name", "layers"), [("lfm2", "ssas"), ("lfm2-moe", "ssas"), ("granite4-dense", "sas")])
def test_layers_without_kv_heads_keep_a_state(name: str, layers: str) -> None:
    config = config_from(name)
    assert pattern(config) == layers
    assert config["num_key_value_heads"] == 2
    heads = [0 if letter == "a" else 2 for letter in layers]
    assert pattern(config_from(name, attention__head_count_kv=heads)) == layers.translate(str.maketrans("as", "sa"))


def test_a_file_whose_layers_all_have_no_kv_heads_is_refused() -> None:
    with raises_code(CheckpointError, "invalid_head_count_kv"):
        config_from("lfm2", attention__head_count_kv=[0, 0, 0, 0])


@pytest.mark.parametrize("name", DELTA_NAMES)
def test_sizes_of_delta_nets_come_from_the_keys_of_state_spaces(name: str) -> None:
    layer = layer_of(config_from(name, ssm__conv_kernel=3))
    key_heads = 3 if name == "qwen3.5-moe" else 2
    assert (layer.num_key_heads, layer.num_heads, layer.key_size, layer.value_size) == (key_heads, 6, 24, 40)
    assert layer.num_taps == 3
    with raises_code(CheckpointError, "invalid_inner_size"):
        config_from(name, ssm__inner_size=None)


def test_heads_are_tiled_in_files_of_the_newer_families() -> None:
    assert [config_from(name).get(TILED, False) for name in DELTA_NAMES] == [False, True, True]
    assert layer_of(config_from("qwen3.5")).is_tiled


def test_sizes_of_state_spaces_and_convolutions() -> None:
    layer = layer_of(config_from("granite4", ssm__group_count=2))
    assert (layer.num_key_heads, layer.num_heads, layer.key_size, layer.value_size) == (2, 8, 20, 24)
    assert (layer.out_size, layer.num_taps, layer.has_tap_bias) == (192, 4, True)
    assert layer_of(config_from("lfm2", shortconv__l_cache=4)).num_taps == 4


def test_heads_of_state_space_models_turn_unless_a_file_says_that_they_do_not() -> None:
    assert "position_embedding_type" not in config_from("granite4")
    for said in (True, None):
        config = config_from("granite4", rope__scaling__finetuned=said)
        assert config["position_embedding_type"] == "rope"
        assert read_shape(config).layers[2].rope.num_rotated == 32
    assert read_shape(config_from("granite4")).layers[2].rope.num_rotated == 0


def test_the_config_names_the_layout_and_the_mixture() -> None:
    config = config_from("lfm2-moe")
    assert config[LAYOUT] == "gguf"
    mixtures = [layer.mixture for layer in read_shape(config).layers]
    assert [mixture is None for mixture in mixtures] == [True, False, False, False]
    assert mixtures[1] is not None
    assert (mixtures[1].num_experts, mixtures[1].num_used, mixtures[1].has_choice_bias) == (8, 3, True)
    assert all(layer.mixture is None for layer in read_shape(config_from("granite4-dense")).layers)


@pytest.mark.parametrize("name", [*DELTA_NAMES, *OTHER_NAMES])
def test_a_file_is_read_as_the_tensors_that_the_decoder_needs(name: str, tmp_path: Path) -> None:
    config, stored = plan(read_parts(write(tmp_path / "x.gguf", keys_of(name), HEADERS[name]["shapes"])))
    assert len(stored) == len(HEADERS[name]["shapes"])
    for tensor, shape in HEADERS[name]["shapes"].items():
        assert stored[str(tensor_name(config["model_type"], tensor))].shape == tuple(shape)


def test_layers_that_guess_tokens_are_passed_over(tmp_path: Path) -> None:
    shapes = HEADERS["qwen3.5"]["shapes"]
    behind = {tensor.replace("blk.4.", "blk.5."): shape for tensor, shape in shapes.items() if "blk.4." in tensor}
    more = {**shapes, **behind, "blk.5.nextn.eh_proj.weight": [96, 192]}
    kinds = [True, False, True, True, False, False]
    keys = keys_of("qwen3.5", block_count=6, nextn_predict_layers=1, attention__recurrent_layers=kinds)
    config, stored = plan(read_parts(write(tmp_path / "x.gguf", keys, more)))
    assert (config["num_hidden_layers"], pattern(config)) == (5, "sassa")
    assert len(stored) == len(shapes)
    assert not any(".5." in name for name in stored)


def test_a_layer_behind_the_last_is_refused_where_none_guesses(tmp_path: Path) -> None:
    more = {**HEADERS["qwen3.5"]["shapes"], "blk.5.attn_norm.weight": [96]}
    with raises_code(CheckpointError, "unexpected_tensor"):
        plan(read_parts(write(tmp_path / "x.gguf", keys_of("qwen3.5"), more)))


def test_a_gate_that_lost_a_dimension_is_a_matrix_of_one_row(tmp_path: Path) -> None:
    flat = {
        tensor: [96] if "gate_inp_shexp" in tensor else shape
        for tensor, shape in HEADERS["qwen3-next"]["shapes"].items()
    }
    _, stored = plan(read_parts(write(tmp_path / "x.gguf", keys_of("qwen3-next"), flat)))
    gates = [tensor for name, tensor in stored.items() if name.endswith("mlp.shared_expert_gate.weight")]
    assert [gate.shape for gate in gates] == [(1, 96)] * 5


def test_guessing_layers_of_a_family_that_has_none_are_refused() -> None:
    with raises_code(CheckpointError, "unsupported_nextn_predict_layers"):
        config_from("lfm2", nextn_predict_layers=1)
