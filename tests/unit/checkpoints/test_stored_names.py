"""What makers call tensors becomes what the decoder calls them: renamed, passed over, or cut into experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.checkpoints import resolve
from quire.checkpoints.directory import decoder_names
from quire.checkpoints.families import expected_shapes, read_shape
from quire.checkpoints.stored_tensors import StoredTensor
from tests.support.models.plain_hybrids import CONFIGS
from tests.support.models.tiny_hybrids import random_tensors, write_model

LAYER = "model.layers.3."
RENAMED = [
    ("qwen3_next", f"{LAYER}mlp.shared_expert.gate_proj.weight", f"{LAYER}mlp.gate_proj.weight"),
    ("qwen3_5_moe_text", f"{LAYER}mlp.shared_expert.down_proj.weight", f"{LAYER}mlp.down_proj.weight"),
    ("qwen3_5_moe_text", f"{LAYER}mlp.shared_expert_gate.weight", f"{LAYER}mlp.shared_expert_gate.weight"),
    ("lfm2", "model.embedding_norm.weight", "model.norm.weight"),
    ("lfm2", f"{LAYER}self_attn.out_proj.weight", f"{LAYER}self_attn.o_proj.weight"),
    ("lfm2", f"{LAYER}self_attn.q_layernorm.weight", f"{LAYER}self_attn.q_norm.weight"),
    ("lfm2_moe", f"{LAYER}self_attn.k_layernorm.weight", f"{LAYER}self_attn.k_norm.weight"),
    ("lfm2_moe", f"{LAYER}feed_forward.w2.weight", f"{LAYER}mlp.down_proj.weight"),
    ("lfm2_moe", f"{LAYER}feed_forward.experts.5.w2.weight", f"{LAYER}feed_forward.experts.5.w2.weight"),
    ("lfm2", f"{LAYER}conv.out_proj.weight", f"{LAYER}conv.out_proj.weight"),
    ("granitemoehybrid", f"{LAYER}shared_mlp.input_linear.weight", f"{LAYER}mlp.gate_up_proj.weight"),
    ("granitemoehybrid", f"{LAYER}shared_mlp.output_linear.weight", f"{LAYER}mlp.down_proj.weight"),
    ("llama", f"{LAYER}mlp.shared_expert.gate_proj.weight", f"{LAYER}mlp.shared_expert.gate_proj.weight"),
]
MIXTURE = {
    **CONFIGS["delta"], "model_type": "qwen3_5_moe_text", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 10, "shared_expert_intermediate_size": 12,
}  # fmt: skip


def stored(kind: str, *shape: int, num_bytes: int = 0) -> StoredTensor:
    sizes = {"F32": 4, "BF16": 2, "F16": 2}
    return StoredTensor(Path("x.safetensors"), kind, shape, 100, num_bytes or sizes[kind] * int(np.prod(shape)))


@pytest.mark.parametrize(("model_type", "given", "name"), RENAMED)
def test_makers_names_become_the_decoders(model_type: str, given: str, name: str) -> None:
    tensor = stored("F32", 4, 5)
    assert decoder_names({"model_type": model_type}, {given: tensor}) == {name: tensor}


def test_layers_that_guess_tokens_are_passed_over_where_the_family_has_them() -> None:
    given = {"mtp.layers.0.mlp.up_proj.weight": stored("F32", 4, 5), "model.norm.weight": stored("F32", 4)}
    assert list(decoder_names({"model_type": "qwen3_5_text"}, given)) == ["model.norm.weight"]
    assert decoder_names({"model_type": "qwen3"}, given) == given
    assert decoder_names({"model_type": "nobody"}, given) == given


def test_experts_that_are_one_tensor_are_cut_where_each_begins() -> None:
    place = f"{LAYER}mlp.experts."
    given = {f"{place}gate_up_proj": stored("BF16", 3, 8, 5), f"{place}down_proj": stored("F32", 3, 5, 4)}
    found = decoder_names({"model_type": "qwen3_next"}, given)
    assert len(found) == 9
    assert found[f"{place}0.gate_proj.weight"] == StoredTensor(Path("x.safetensors"), "BF16", (4, 5), 100, 40)
    for expert in range(3):
        parts = [found[f"{place}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")]
        assert [part.offset - 100 for part in parts] == [80 * expert, 80 * expert + 40, 80 * expert]
        assert [part.num_bytes for part in parts] == [40, 40, 80]
        assert [part.shape for part in parts] == [(4, 5), (4, 5), (5, 4)]


@pytest.mark.parametrize("tensor", [
    stored("F8_E4M3", 3, 8, 5, num_bytes=120), stored("U8", 3, 8, 5, num_bytes=120), stored("F32", 3, 7, 5),
    stored("F32", 24, 5),
], ids=["quantised", "codes", "of an odd height", "flat"])  # fmt: skip
def test_what_cannot_be_cut_is_left_alone(tensor: StoredTensor) -> None:
    name = f"{LAYER}mlp.experts.gate_up_proj"
    assert decoder_names({"model_type": "qwen3_next"}, {name: tensor}) == {name: tensor}


def test_a_family_whose_experts_are_one_tensor_keeps_it() -> None:
    given = {f"{LAYER}mlp.experts.gate_up_proj": stored("F32", 3, 8, 5)}
    assert decoder_names({"model_type": "gpt_oss"}, given) == given


def test_cut_experts_hold_the_numbers_of_each(tmp_path: Path) -> None:
    tensors = random_tensors(MIXTURE, seed=3)
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        place = f"model.layers.{layer}.mlp.experts."
        each = [[tensors[f"{place}{at}.{name}_proj.weight"] for name in ("gate", "up", "down")] for at in range(3)]
        fused[f"{place}gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
        fused[f"{place}down_proj"] = np.stack([down for *_, down in each])
    found = resolve(str(write_model(tmp_path, MIXTURE, fused))).tensors
    assert found.keys() == expected_shapes(read_shape(MIXTURE)).keys()
    raw = (tmp_path / "model.safetensors").read_bytes()
    for name, tensor in found.items():
        held = np.frombuffer(raw, np.float32, tensor.num_values, tensor.offset).reshape(tensor.shape)
        assert np.array_equal(held, tensors[name]), name


def test_a_cut_is_of_the_same_file_and_type() -> None:
    whole = replace(stored("F16", 2, 6, 4), path=Path("y.safetensors"))
    found = decoder_names({"model_type": "qwen3_next"}, {f"{LAYER}mlp.experts.down_proj": whole})
    assert {(part.path.name, part.type) for part in found.values()} == {("y.safetensors", "F16")}
