"""A Hugging Face directory is read for what it says, checked against itself, and never executed."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints import CheckpointError, load_tokenizer, resolve
from tests.support.errors import raises_code
from tests.support.models.tiny_models import TEMPLATE, make_directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(str(folder))
    return caught.value.code


def test_a_sharded_directory_is_read_in_the_order_of_its_files(folder: Path) -> None:
    checkpoint = resolve(str(folder))
    assert [path.name for path in checkpoint.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert checkpoint.tokenizer_file == folder / "tokenizer.json"
    assert checkpoint.chat_template == TEMPLATE
    assert checkpoint.generation_defaults == {"temperature": 0.6, "top_k": 40, "top_p": 0.9}


def test_one_weight_file_needs_no_index(tmp_path: Path) -> None:
    checkpoint = resolve(str(make_directory(tmp_path / "model", num_shards=1)))
    assert [path.name for path in checkpoint.weight_files] == ["model.safetensors"]


def test_every_end_that_any_file_names_is_an_end(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=5)
    edit(folder / "generation_config.json", eos_token_id=[6, 7])
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    checkpoint = resolve(str(folder))
    assert checkpoint.eos_token_ids == {5, 6, 7}
    assert checkpoint.eos_texts == {"<|endoftext|>"}
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert checkpoint.end_tokens(tokenizer.token_to_id) == {0, 5, 6, 7}


def test_an_end_that_the_tokenizer_does_not_know_is_none(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|nobody|>"})
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    checkpoint = resolve(str(folder))
    assert checkpoint.end_tokens(tokenizer.token_to_id) == checkpoint.eos_token_ids


def test_a_model_is_resolved_without_its_tokenizer_being_opened(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("no tokenizer")
    checkpoint = resolve(str(folder))
    assert checkpoint.tokenizer_file == folder / "tokenizer.json"
    with raises_code(CheckpointError, "invalid_tokenizer"):
        load_tokenizer(folder / "tokenizer.json")


def test_a_model_that_wants_greedy_decoding_has_no_sampling_defaults(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=False)
    assert resolve(str(folder)).generation_defaults == {}


def test_of_several_templates_the_default_is_taken_and_the_jinja_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert resolve(str(folder)).chat_template == "D"
    edit(folder / "tokenizer_config.json", chat_template="S")
    assert resolve(str(folder)).chat_template == "S"
    (folder / "chat_template.jinja").write_text("J")
    assert resolve(str(folder)).chat_template == "J"


def test_a_directory_without_tokenizer_and_generation_config_is_read_too(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    checkpoint = resolve(str(folder))
    assert (checkpoint.tokenizer_file, checkpoint.chat_template) == (None, None)
    assert checkpoint.eos_token_ids == {2}


def test_code_in_the_directory_is_ignored_and_its_map_dropped(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    edit(folder / "config.json", auto_map={"AutoModel": "modeling_evil.Evil"})
    assert "auto_map" not in resolve(str(folder)).config


def test_the_fingerprint_follows_config_and_weights_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    here = resolve(str(folder)).fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / "copy")
    assert resolve(str(moved)).fingerprint == here
    edit(moved / "config.json", rope_theta=20000.0)
    assert resolve(str(moved)).fingerprint != here


def test_pickled_weights_are_refused_with_the_reason(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert refusal(folder) == "weights_pickled"
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder) == "weights_missing"


@pytest.mark.parametrize(
    ("name", "changes", "code"),
    [
        ("config.json", {"model_type": None}, "invalid_model_type"),
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}, "unsupported_quantisation"),
        ("config.json", {"quantization_config": "gptq"}, "unsupported_quantisation"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "unsupported_num_bits"),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "desc_act": True}}, "scattered_groups"),
        ("config.json", {"quantization_config": {"quant_method": "awq", "bits": 8}}, "unsupported_num_bits"),
        ("config.json", {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "awq_not_gemm"),
        (
            "config.json",
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 0}},
            "invalid_group_size",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 2]}},
            "blocks_not_square",
        ),
        ("config.json", {"quantization_config": {"quant_method": "compressed-tensors"}}, "several_config_groups"),
        ("config.json", {"hidden_size": -1}, "invalid_hidden_size"),
        ("config.json", {"hidden_size": True}, "invalid_hidden_size"),
        ("config.json", {"hidden_size": 64}, "wrong_tensor_shape"),
        ("config.json", {"num_hidden_layers": 10**9}, "too_few_tensors"),
        ("config.json", {"num_hidden_layers": 2}, "tensor_missing"),
        ("config.json", {"tie_word_embeddings": False}, "tensor_missing"),
        ("config.json", {"tie_word_embeddings": "yes"}, "invalid_tie_word_embeddings"),
        ("config.json", {"attention_bias": True}, "tensor_missing"),
        ("config.json", {"rope_scaling": 3}, "invalid_rope_scaling"),
        ("config.json", {"rope_theta": -1.0}, "invalid_rope_theta"),
        ("config.json", {"eos_token_id": -1}, "invalid_eos_token_id"),
        ("config.json", {"eos_token_id": ["2"]}, "invalid_eos_token_id"),
        ("generation_config.json", {"temperature": -1}, "invalid_temperature"),
        ("generation_config.json", {"top_k": "40"}, "invalid_top_k"),
        ("tokenizer_config.json", {"eos_token": 2}, "invalid_eos_token"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(folder: Path, name: str, changes: dict[str, Any], code: str) -> None:
    edit(folder / name, **changes)
    assert refusal(folder) == code


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b"[" * 200_000, b"\xff\xfe", b"9" * 9999],
)
def test_json_that_is_not_plain_json_is_refused(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    assert refusal(folder) == ("not_json_object" if raw == b"[]" else "not_json")


@pytest.mark.parametrize("template", [3, [], ["x"], [{"name": "default"}], "x" * 1_000_001])
def test_a_template_that_is_no_text_is_refused(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=template)
    assert refusal(folder) == "invalid_template"


def test_a_tokenizer_that_asks_for_endless_padding_pads_nothing(folder: Path) -> None:
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    edit(folder / "tokenizer.json", padding=padding)
    assert load_tokenizer(folder / "tokenizer.json").padding is None
