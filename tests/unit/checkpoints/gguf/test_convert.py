"""A GGUF file, read where it lies or converted, has the values, names, order of rows and config that Hugging Face's
classes expect."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors import safe_open
from safetensors.numpy import load_file

from quire.checkpoints import Checkpoint, resolve
from quire.checkpoints import cache as cache_room
from quire.checkpoints.cache import UNFINISHED
from quire.checkpoints.gguf import convert as gguf_convert
from quire.checkpoints.gguf import model as gguf_model
from quire.checkpoints.gguf.config import shortest_decimal
from quire.checkpoints.stored_tensors import dequantize, half_split, read_rows
from quire.checkpoints.stored_tensors import opened_weights as opened_file
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.tiny_models import Array, Tiny, converted, piece_metadata, write_gguf


def opened(folder: Path, tiny: Tiny) -> Checkpoint:
    return resolve(str(write_gguf(folder / "tiny.gguf", tiny)), cache=folder / "cache")


def convert(folder: Path, tiny: Tiny) -> Checkpoint:
    return converted(opened(folder, tiny))


def refusal(folder: Path, tiny: Tiny) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tiny)
    return caught.value.code


def interleaved(weights: Array, num_heads: int) -> Array:
    """Hugging Face's order of rows into GGUF's, as the format's own converter does it."""
    head_dim = weights.shape[0] // num_heads
    order = [head * head_dim + half * (head_dim // 2) + pair
             for head in range(num_heads) for pair in range(head_dim // 2) for half in (0, 1)]  # fmt: skip
    return weights[order]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_every_quantisation_gives_the_values_of_the_formats_own_package(tmp_path: Path, kind: str) -> None:
    checkpoint = convert(tmp_path, Tiny(kind=kind, hidden=256, intermediate=512))
    tensors = load_file(checkpoint.weight_files[0])
    source = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        expected = quants.dequantize(source[theirs].data, GGMLQuantizationType[kind])
        assert tensors[ours].dtype == np.float32
        assert np.array_equal(tensors[ours], expected.reshape(tensors[ours].shape)), theirs


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("count", [1, 5, 256])
def test_rows_read_where_they_lie_are_those_of_the_conversion(tmp_path: Path, kind: str, count: int) -> None:
    source = opened(tmp_path, Tiny(kind=kind, hidden=256, intermediate=512))
    for checkpoint in (source, converted(source)):
        assert set(checkpoint.tensors) == set(source.tensors)
    made = converted(source).tensors
    for name, tensor in source.tensors.items():
        with opened_file(tensor.path) as file, opened_file(made[name].path) as other:
            for first in range(0, tensor.num_rows, count):
                some = min(count, tensor.num_rows - first)
                mine = dequantize(read_rows(file, tensor, first, some), tensor.type)
                theirs = dequantize(read_rows(other, made[name], first, some), made[name].type)
                assert np.array_equal(mine, theirs), name


def test_a_file_that_ends_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    tensor = opened(tmp_path, Tiny()).tensors["model.embed_tokens.weight"]
    tensor.path.write_bytes(tensor.path.read_bytes()[: tensor.offset + 10])
    with opened_file(tensor.path) as file, raises_code(CheckpointError, "file_cut_off"):
        read_rows(file, tensor, 0, 3)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_half_precision_keeps_its_type_and_its_bits(tmp_path: Path, kind: str, dtype: str) -> None:
    checkpoint = convert(tmp_path, Tiny(kind=kind))
    raw = next(
        tensor for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors if tensor.name == "token_embd.weight"
    ).data
    with safe_open(checkpoint.weight_files[0], "np") as file:
        entry = file.get_slice("model.embed_tokens.weight")
        assert entry.get_dtype() == kind
    assert raw.tobytes() in checkpoint.weight_files[0].read_bytes()
    assert checkpoint.config["dtype"] == dtype


def test_query_and_key_rows_of_llama_come_back_into_hugging_faces_order(tmp_path: Path) -> None:
    dice = np.random.default_rng(1)
    query, key = (dice.standard_normal((size, 32), dtype=np.float32) for size in (32, 16))
    tensors = {"blk.0.attn_q.weight": interleaved(query, 4), "blk.0.attn_k.weight": interleaved(key, 2)}
    made = load_file(convert(tmp_path, Tiny(tensors=tensors)).weight_files[0])
    assert np.array_equal(made["model.layers.0.self_attn.q_proj.weight"], query)
    assert np.array_equal(made["model.layers.0.self_attn.k_proj.weight"], key)


def test_rotating_halves_after_the_reordering_scores_as_rotating_neighbours_before() -> None:
    dice, head_dim = np.random.default_rng(2), 8
    rows = dice.standard_normal((2, head_dim))
    angles = dice.standard_normal((2, head_dim // 2))

    def rotated(first: Array, second: Array, angle: Array) -> Array:
        turned = (first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle))
        return np.concatenate(turned)

    neighbours = [rotated(row[0::2], row[1::2], angle) for row, angle in zip(rows, angles, strict=True)]
    moved = [half_split(row.reshape(head_dim, 1).view(np.uint8), head_dim).view(np.float64) for row in rows]
    halves = [rotated(row[:4, 0], row[4:, 0], angle) for row, angle in zip(moved, angles, strict=True)]
    assert neighbours[0] @ neighbours[1] == pytest.approx(halves[0] @ halves[1])


def test_slices_of_any_size_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Tiny(kind="Q4_1"))
    whole = converted(resolve(str(path), cache=tmp_path / "a"))
    monkeypatch.setattr(gguf_convert, "CHUNK_VALUES", 96)
    sliced = converted(resolve(str(path), cache=tmp_path / "b"))
    assert whole.weight_files[0].read_bytes() == sliced.weight_files[0].read_bytes()
    assert whole.fingerprint == sliced.fingerprint


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_config_is_one_that_transformers_builds_and_fills_completely(tmp_path: Path, arch: str) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = convert(tmp_path, Tiny(arch=arch, num_layers=2, tied=False))
    config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
    assert config.model_type == arch
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (8, 2, 1e-5)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_id) == (False, 1, 2)
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in load_file(checkpoint.weight_files[0]).items()}


def test_qwens_biases_and_norms_arrive_under_their_names(tmp_path: Path) -> None:
    for arch, name in {"qwen2": "q_proj.bias", "qwen3": "q_norm.weight"}.items():
        (tmp_path / arch).mkdir()
        made = load_file(convert(tmp_path / arch, Tiny(arch=arch)).weight_files[0])
        assert f"model.layers.0.self_attn.{name}" in made


def test_rope_scaling_is_carried_over(tmp_path: Path) -> None:
    for kind, extra in {"linear": {}, "yarn": {"original_max_position_embeddings": 32}}.items():
        (tmp_path / kind).mkdir()
        scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0,
                   "llama.rope.scaling.original_context_length": 32}  # fmt: skip
        config = convert(tmp_path / kind, Tiny(metadata=scaling)).config
        assert config["rope_scaling"] == {"rope_type": kind, "factor": 4.0, **extra}
    longrope = Tiny(metadata={"llama.rope.scaling.type": "longrope"})
    assert refusal(tmp_path, longrope) == "unsupported_rope_scaling"


def llama3_tensor(factor: float, head_dim: int, theta: float) -> Array:
    """The factors as the format's own converter computes them."""
    made = []
    for frequency in theta ** -(np.arange(0, head_dim, 2) / head_dim):
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1) / 3
        made.append(1.0 if length < 8192 / 4 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_factors_are_recognised(tmp_path: Path, factor: float) -> None:
    metadata = {"llama.rope.freq_base": 500_000.0}
    tiny = Tiny(hidden=128, num_heads=2, num_kv_heads=1, metadata=metadata,
                tensors={"rope_freqs.weight": llama3_tensor(factor, 64, 500_000.0)})  # fmt: skip
    scaling = convert(tmp_path, tiny).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_rope_factors_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    tiny = Tiny(tensors={"rope_freqs.weight": np.full(4, 3, np.float32)})
    assert refusal(tmp_path, tiny) == "unsupported_rope_factors"


def test_a_sliding_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    config = convert(tmp_path, Tiny(metadata={"llama.attention.sliding_window": 64})).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


@pytest.mark.parametrize(
    ("tiny", "code"),
    [
        (Tiny(arch="gemma2"), "unsupported_architecture"),
        (Tiny(arch="qwen2", metadata={"qwen2.expert_count": 8}), "unsupported_expert_count"),
        (Tiny(metadata={"llama.expert_count": 8, "llama.expert_used_count": 2}), "tensor_missing"),
        (Tiny(metadata={"llama.context_length": None}), "invalid_context_length"),
        (Tiny(metadata={"llama.context_length": "long"}), "invalid_context_length"),
        (Tiny(metadata={"llama.block_count": 2}), "tensor_missing"),
        (Tiny(metadata={"llama.block_count": 2_000_000_000}), "too_few_tensors"),
        (Tiny(metadata={"llama.feed_forward_length": 64}), "wrong_tensor_shape"),
        (Tiny(metadata={"llama.attention.head_count_kv": 3}), "heads_not_divisible"),
        (Tiny(metadata={"llama.rope.dimension_count": 4}), "head_rotates_partly"),
        (Tiny(metadata={"split.count": 3}), "wrong_part_number"),
        (Tiny(metadata={"tokenizer.ggml.eos_token_id": 99_999}), "invalid_eos_token_id"),
        (Tiny(tensors={"token_embd.weight": None}), "embedding_missing"),
        (Tiny(tensors={"blk.0.ffn_up.weight": None}), "tensor_missing"),
        (Tiny(tensors={"blk.0.attn_q.bias": np.zeros(32, np.float32)}), "unexpected_tensor"),
        (Tiny(tensors={"blk.0.odd.weight": np.zeros(32, np.float32)}), "unexpected_tensor"),
        (Tiny(tensors={"output_norm.weight": np.full(32, np.nan, np.float32)}), "weights_not_finite"),
        (Tiny(tensors={"token_embd.weight": np.full((266, 32), np.inf, np.float16)}), "weights_not_finite"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_no_half(tmp_path: Path, tiny: Tiny, code: str) -> None:
    assert refusal(tmp_path, tiny) == code
    assert list((tmp_path / "cache").rglob("*.safetensors")) + list((tmp_path / "cache").rglob(f"{UNFINISHED}*")) == []


def test_the_second_time_nothing_is_described_or_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path, Tiny())
    made = converted(first)
    monkeypatch.setattr(gguf_model, "_write_description", lambda *_: pytest.fail("described again"))
    monkeypatch.setattr(gguf_convert, "_write", lambda *_: pytest.fail("converted again"))
    again = resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache")
    assert again == first
    assert converted(again) == made


def test_a_changed_file_gets_another_directory_and_another_fingerprint(tmp_path: Path) -> None:
    first = opened(tmp_path, Tiny(seed=1))
    second = opened(tmp_path, Tiny(seed=2))
    assert first.directory != second.directory
    assert first.fingerprint != second.fingerprint


def test_a_copied_and_renamed_file_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = opened(tmp_path, Tiny())
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other.gguf")
    assert resolve(str(tmp_path / "other.gguf"), cache=tmp_path / "b").fingerprint == first.fingerprint


def test_two_describing_at_once_both_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Tiny())
    real = gguf_model._write_description

    def describe_after_another_did(file: Any, final: Path, progress: Any) -> None:
        monkeypatch.setattr(gguf_model, "_write_description", real)
        real(file, final, progress)
        real(file, final, progress)  # finds the place taken when it is done

    monkeypatch.setattr(gguf_model, "_write_description", describe_after_another_did)
    checkpoint = resolve(str(path), cache=tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache" / "converted").iterdir()] == [checkpoint.directory.name]


def test_four_threads_resolving_one_file_get_one_checkpoint(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", Tiny()))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: resolve(path, cache=tmp_path / "cache"), range(4)))
    assert len({checkpoint.fingerprint for checkpoint in found}) == 1
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 1


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_room, "SPARE_BYTES", 1 << 62)
    assert refusal(tmp_path, Tiny()) == "disk_full"


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert refusal(tmp_path, Tiny()) == "folder_not_writable"


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = write_gguf(tmp_path / "tiny.gguf", Tiny())
    checkpoint = resolve(str(path), cache=tmp_path / "cache", progress=lambda *told: seen.append(told))
    gguf_convert.ensure_safetensors(checkpoint, lambda *told: seen.append(told))
    for label in ("reading tiny.gguf", "converting tiny.gguf"):
        told = [one for one in seen if one[0] == label]
        assert told == sorted(told)
        assert told[-1][1] == told[-1][2] > 0


def test_sampling_and_ends_in_the_metadata_become_the_generation_config(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "tokenizer.ggml.eot_token_id": 0}
    checkpoint = convert(tmp_path, Tiny(metadata=metadata))
    assert checkpoint.generation_defaults == {"temperature": 0.7, "top_k": 20}
    assert checkpoint.eos_token_ids == {0, 2}
    assert checkpoint.bos_token_id == 1


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, Tiny())
    (checkpoint.directory / "config.json").write_bytes(b"")
    with raises_code(CheckpointError, "conversion_damaged"):
        resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache")


def test_numbers_of_32_bits_are_written_as_people_wrote_them() -> None:
    for value in (1e-5, 1e-6, 10000.0, 500000.0, 0.7, 1.5):
        assert shortest_decimal(float(np.float32(value))) == value


def test_a_file_may_have_a_tokenizer_of_pieces(tmp_path: Path) -> None:
    described = json.loads(
        (convert(tmp_path, Tiny(metadata=piece_metadata())).directory / "tokenizer_config.json").read_text()
    )
    assert (described["bos_token"], described["unk_token"], described["add_bos_token"]) == ("<s>", "<unk>", True)
