"""Models whose safetensors are quantised: they answer as the weights they stand for, in float bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from quire.backends.kernels import extension
from quire.backends.load import load_backend
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.machine.process_memory import AMPLE_BYTES
from tests.support.models.models import Ask, Machine
from tests.support.models.quantised import Pack, Quantised, awq, compressed, gptq, retyped
from tests.support.models.tiny_models import Tiny, make_directory

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

SETTINGS = ModelSettings(
    memory_bytes=AMPLE_BYTES, block_size=16, max_step_tokens=64, max_running=8, kv_dtype="float32", backend="cpu"
)
TINY = Tiny("qwen2", hidden=128, num_heads=2, num_kv_heads=1, num_layers=2, intermediate=192, tied=False)
GROUP = 32
CONFIGS: dict[str, tuple[Pack, int, dict[str, Any]]] = {
    "gptq-4": (gptq, 4, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq-8": (gptq, 8, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, 4, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (
        compressed, 4,
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "symmetric": False}}},
        },
    ),
}  # fmt: skip


def answers(directory: Path, settings: ModelSettings = SETTINGS) -> list[list[int]]:
    runner = load_backend(resolve(str(directory)), settings).runner
    prompts = ([5], list(range(3, 40)), [7, 8] * 10)
    asks = [Ask(prompt, ResolvedSampling(max_tokens=8), seed=at) for at, prompt in enumerate(prompts)]
    return [ask.tokens for ask in Machine(runner).run(asks)]


def is_layer(name: str) -> bool:
    return name.endswith("_proj.weight")


def plain_directory(folder: Path) -> tuple[Path, dict[str, NDArray[Any]]]:
    directory = make_directory(folder / "model", num_shards=1, tiny=TINY)
    return directory, dict(load_file(directory / "model.safetensors"))


def say(directory: Path, quantisation: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))


@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_weights_answer_as_what_they_stand_for(name: str, tmp_path: Path) -> None:
    pack, num_bits, config = CONFIGS[name]
    directory, tensors = plain_directory(tmp_path)
    layers = sorted(filter(is_layer, tensors))
    made: dict[str, Quantised] = {}
    for at, layer in enumerate(layers):
        num_out, num_in = tensors[layer].shape
        made[layer] = Quantised.draw(num_bits, num_out, num_in, GROUP, at)
    save_file(tensors | {layer: one.weight for layer, one in made.items()}, directory / "model.safetensors")
    expected = answers(directory)
    parts = {
        f"{layer.removesuffix('.weight')}.{part}": stored.array
        for layer, one in made.items()
        for part, stored in pack(one, num_bits).items()
    }
    rest = {key: value for key, value in tensors.items() if not is_layer(key)}
    save_file(rest | parts, directory / "model.safetensors")
    say(directory, config)
    assert answers(directory, replace(SETTINGS, arithmetic="float")) == expected
    assert answers(directory, replace(SETTINGS, dtype="float32")) == expected
    assert answers(directory, replace(SETTINGS, arithmetic="int8"))
    with raises_code(ConfigError, "invalid_config"):
        load_backend(resolve(str(directory)), replace(SETTINGS, backend="torch"))
    save_file({**rest, **{key: value for key, value in parts.items() if "scale" not in key}},
              directory / "model.safetensors")  # fmt: skip
    with pytest.raises(CheckpointError):
        resolve(str(directory))


@pytest.mark.parametrize("is_by_blocks", [True, False])
def test_fp8_weights_answer_as_what_they_stand_for(is_by_blocks: bool, tmp_path: Path) -> None:
    directory, tensors = plain_directory(tmp_path)
    dice = np.random.default_rng(1)
    parts: dict[str, NDArray[Any]] = {}
    for layer in filter(is_layer, sorted(tensors)):
        num_out, num_in = tensors[layer].shape
        codes = dice.integers(0, 48, (num_out, num_in), dtype=np.uint8) | dice.choice([0, 128], (num_out, num_in))
        shape = (-(-num_out // 32), -(-num_in // 32)) if is_by_blocks else (num_out, 1)
        scales = dice.uniform(0.5, 2.0, shape).astype(np.float32)
        name = "weight_scale_inv" if is_by_blocks else "weight_scale"
        parts |= {layer: codes.astype(np.uint8), f"{layer.removesuffix('.weight')}.{name}": scales}
        size = (codes & 0x7F).astype(np.float64)
        wide = np.where(size < 8, size * 2.0**-9, (8 + size % 8) * 2.0 ** (size // 8 - 10)) * np.where(
            codes > 127, -1, 1
        )
        each = np.repeat(np.repeat(scales, 32, 0), 32, 1)[:num_out, :num_in] if is_by_blocks else scales
        tensors[layer] = wide.astype(np.float32) * each
    save_file(tensors, directory / "model.safetensors")
    expected = answers(directory)
    save_file(
        {key: value for key, value in tensors.items() if not is_layer(key)} | parts, directory / "model.safetensors"
    )
    file = directory / "model.safetensors"
    file.write_bytes(retyped(file.read_bytes(), "U8", "F8_E4M3"))
    say(directory, {"quant_method": "fp8", **({"weight_block_size": [32, 32]} if is_by_blocks else {})})
    assert answers(directory) == expected
    assert answers(directory, replace(SETTINGS, dtype="float32")) == expected


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_parts_that_do_not_fit_each_other_are_refused_in_words(name: str, at: int, tmp_path: Path) -> None:
    pack, num_bits, config = CONFIGS[name]
    directory, tensors = plain_directory(tmp_path)
    parts: dict[str, NDArray[Any]] = {}
    for layer in filter(is_layer, sorted(tensors)):
        num_out, num_in = tensors[layer].shape
        packed = pack(Quantised.draw(num_bits, num_out, num_in, GROUP, 1), num_bits)
        parts |= {f"{layer.removesuffix('.weight')}.{part}": stored.array for part, stored in packed.items()}
    wrong = [key for key in parts if "layers.1.mlp.down" in key][at % len([*pack(_TINIEST, num_bits)])]
    cut = parts[wrong][:1] if parts[wrong].ndim > 1 or at == 1 else parts[wrong][::-1].copy()
    rest = {key: value for key, value in tensors.items() if not is_layer(key)}
    save_file(rest | parts | {wrong: np.ascontiguousarray(cut)}, directory / "model.safetensors")
    say(directory, config)
    with pytest.raises(CheckpointError):
        load_backend(resolve(str(directory)), SETTINGS)


_TINIEST = Quantised.draw(4, 8, 32, 32, 0)
