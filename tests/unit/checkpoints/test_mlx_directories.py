"""Directories that mlx-lm has written: which of them are for MLX alone, and which are everybody's."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from quire.backends.cpu.runner import CpuRunner
from quire.checkpoints import CheckpointError, resolve
from quire.checkpoints.quantisation import (
    MLX_BITS,
    Quantisation,
    is_quantised_by_mlx,
    read_quantisation,
    with_joined_parts,
)
from quire.checkpoints.stored_tensors import StoredTensor
from quire.core.request import ResolvedSampling
from tests.support.errors import raises_code
from tests.support.models.mlx_models import SETTINGS, Reference, made_by_mlx
from tests.support.models.models import Ask, Machine, load_runner

PROJECTION = "model.layers.0.self_attn.q_proj"
WORDS = Quantisation("mlx", 4, 32)


def changed(folder: Path, name: str, bits: int | None, drop: str = "", **fields: Any) -> Path:
    """A copy of a small model without one of its tensors, and with another config.json."""
    target = folder / "model"
    shutil.copytree(made_by_mlx(name, bits), target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    if drop:
        file = target / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop}
        save_file(tensors, file, {"format": "mlx"})
        (target / "model.safetensors.index.json").unlink(missing_ok=True)
    return target


@pytest.mark.parametrize("bits", [4, 8])
def test_the_parts_of_a_quantised_weight_are_one(bits: int) -> None:
    checkpoint = resolve(str(made_by_mlx("llama", bits)))
    assert checkpoint.is_for_mlx
    weight = checkpoint.tensors[f"{PROJECTION}.weight"]
    assert [name for name, _ in weight.parts] == ["weight", "scales", "biases"]
    assert (weight.type, weight.shape) == (f"MLX{bits}", (128, 128))
    assert weight.num_bytes == sum(part.num_bytes for _, part in weight.parts)
    assert not [name for name in checkpoint.tensors if name.endswith((".scales", ".biases"))]
    in_files = sum(math.prod(array.shape) * array.itemsize for array in _arrays(checkpoint.weight_files))
    assert sum(tensor.num_bytes for tensor in checkpoint.tensors.values()) == in_files


def _arrays(files: tuple[Path, ...]) -> list[Any]:
    return [array for file in files for array in load_file(file).values()]


def test_each_number_of_bits_is_another_model() -> None:
    prints = {resolve(str(made_by_mlx("llama", bits))).fingerprint for bits in (None, 4, 8)}
    assert len(prints) == 3
    assert resolve(str(made_by_mlx("llama", 4))).fingerprint in prints


def test_a_quantised_weight_without_scales_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama", 4, drop=f"{PROJECTION}.scales")
    with raises_code(CheckpointError, "scales_missing"):
        resolve(str(folder))


def test_a_quantised_weight_may_do_without_biases(tmp_path: Path) -> None:
    checkpoint = resolve(str(changed(tmp_path, "llama", 4, drop=f"{PROJECTION}.biases")))
    assert [name for name, _ in checkpoint.tensors[f"{PROJECTION}.weight"].parts] == ["weight", "scales"]


@pytest.mark.parametrize("bits", [7, 0, "4", None])
def test_codes_of_bits_that_mlx_does_not_have_are_refused(tmp_path: Path, bits: object) -> None:
    folder = changed(tmp_path, "llama", 4, quantization={"bits": bits, "group_size": 32})
    with raises_code(CheckpointError, "unsupported_num_bits"):
        resolve(str(folder))


def test_plain_weights_without_experts_are_everybodys() -> None:
    """The CPU backend says what mlx-lm says."""
    directory = made_by_mlx("llama")
    assert not resolve(str(directory)).is_for_mlx
    runner = load_runner(directory, **{**SETTINGS, "backend": "cpu"})
    assert isinstance(runner, CpuRunner)
    prompts = [list(range(3, 3 + length)) for length in (1, 9, 60)]
    params = ResolvedSampling(temperature=0.0, max_tokens=8)
    asks = Machine(runner).run([Ask(prompt, params) for prompt in prompts])
    reference = Reference(directory)
    assert [ask.tokens for ask in asks] == [reference.answer(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_in_one_tensor_are_for_mlx(name: str) -> None:
    assert resolve(str(made_by_mlx(name))).is_for_mlx


@pytest.mark.parametrize("written_by", ["pt", ""])
def test_experts_in_one_tensor_that_others_wrote_are_held_to_their_names(tmp_path: Path, written_by: str) -> None:
    folder = changed(tmp_path, "qwen3-moe", None)
    for file in folder.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": written_by})
    with pytest.raises(CheckpointError):
        resolve(str(folder))


# -- what config.json says --


def test_settings_under_mlxs_own_name_count_even_beside_the_others() -> None:
    given_twice = {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}}
    assert is_quantised_by_mlx(given_twice)
    assert read_quantisation(given_twice) == Quantisation("mlx", 4, 64)


@pytest.mark.parametrize("given_as", [None, "4 bits", {"quant_method": "gptq", "bits": 4}])
def test_other_settings_of_that_name_are_not_mlxs(given_as: object) -> None:
    assert not is_quantised_by_mlx({"quantization": given_as})


@given(st.sampled_from(MLX_BITS), st.sampled_from(MLX_BITS), st.sampled_from([32, 64, 128]), st.integers(1, 9))
def test_a_layer_with_bits_of_its_own_has_them_and_all_its_inputs(
    bits: int, bits_of_most: int, group: int, num_groups: int
) -> None:
    num_inputs = group * num_groups
    codes = StoredTensor(Path("file"), "U32", (6, num_inputs * bits // 32), 0, 6 * num_inputs * bits // 8)
    scales = StoredTensor(Path("file"), "F32", (6, num_groups), 0, 6 * num_groups * 4)
    joined = with_joined_parts({"a.weight": codes, "a.scales": scales}, Quantisation("mlx", bits_of_most, group))
    assert (joined["a.weight"].type, joined["a.weight"].shape) == (f"MLX{bits}", (6, num_inputs))


# -- parts, whatever their names --

names = st.text("abc.", min_size=1, max_size=6).map(lambda text: f"model.{text}")
parts_of = st.sets(st.sampled_from(["scales", "biases", "bias"]))


@given(st.dictionaries(names, st.tuples(st.sampled_from(["U32", "F32", "BF16"]), parts_of), max_size=6))
def test_every_tensor_is_kept_once_by_itself_or_as_a_part(drawn: dict[str, tuple[str, set[str]]]) -> None:
    tensors: dict[str, StoredTensor] = {}
    for base, (kind, parts) in drawn.items():
        for at, part in enumerate(["weight", *sorted(parts)]):
            kind_of = kind if part == "weight" else "F32"
            tensors[f"{base}.{part}"] = StoredTensor(Path("file"), kind_of, (2, 4 + at), len(tensors) * 64, 7 + at)
    is_sound = all("scales" in parts for kind, parts in drawn.values() if kind == "U32")
    if not is_sound:
        with raises_code(CheckpointError, "scales_missing"):
            with_joined_parts(tensors, WORDS)
        return
    joined = with_joined_parts(tensors, WORDS)
    flat = {f"{name.removesuffix('.weight')}.{part}": one for name, t in joined.items() for part, one in t.parts}
    assert flat | {name: tensor for name, tensor in joined.items() if not tensor.parts} == tensors
    assert sum(tensor.num_bytes for tensor in joined.values()) == sum(tensor.num_bytes for tensor in tensors.values())
    assert all(tensor.type.startswith("MLX") == bool(tensor.parts) for tensor in joined.values())
