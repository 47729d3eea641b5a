"""Mixtures of experts: a row's answer does not depend on its company, and experts keep the format their file has."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.bench_mixture import BenchMixture, active_bytes, write_mixture
from quire.checkpoints import resolve
from quire.core.request import ResolvedSampling
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, load_runner

MIXTURES = [name for name, (_, fields) in architectures.TODAY.items() if any("experts" in field for field in fields)]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def prompts_of(count: int, seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 131) for _ in range(dice.randint(1, 70))] for _ in range(count)]


def answers(runner: object, prompts: list[list[int]], **settings: object) -> list[tuple[list[int], object]]:
    params = ResolvedSampling(temperature=0.0, max_tokens=12, logprobs=2)
    asks = Machine(runner, **settings).run([Ask(prompt, params) for prompt in prompts])  # type: ignore[arg-type]
    return [(ask.tokens, ask.logprobs) for ask in asks]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, dtype: str) -> None:
    runner = load_runner(architectures.directory(name), memory_bytes=8 << 30, max_sequence_tokens=256, dtype=dtype)
    prompts = prompts_of(9, seed=sum(name.encode()))
    alone = [answers(runner, [prompt])[0] for prompt in prompts]
    assert answers(runner, prompts) == alone
    assert answers(runner, prompts[::-1], max_step_tokens=37, max_running=3) == alone[::-1]


def rounded_to_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., out, in] as blocks of 16 bytes, scales, and what they stand for."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-20))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    codes = nearest + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    meant = FP4[nearest] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(exponents)[..., None]
    return blocks, (exponents + 127).to(torch.uint8), meant.reshape(values.shape)


def test_experts_in_mxfp4_answer_like_the_numbers_they_stand_for(tmp_path: Path) -> None:
    source = architectures.directory("gpt-oss")
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    few, many = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        blocks, scales, meant = rounded_to_mxfp4(tensors[name].transpose(1, 2))
        many[name] = meant.transpose(1, 2).contiguous()
        del few[name]
        few |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for folder, held, fields in ((plain, many, {}), (packed, few, {"quantization_config": {"quant_method": "mxfp4"}})):
        folder.mkdir()
        save_file(held, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | fields))
    prompts = prompts_of(4, seed=9)
    told = [
        answers(load_runner(folder, memory_bytes=8 << 30, max_sequence_tokens=256, **settings), prompts)
        for folder, settings in ((plain, {"dtype": "float32"}), (packed, {"dtype": "auto", "arithmetic": "float"}))
    ]
    assert [tokens for tokens, _ in told[0]] == [tokens for tokens, _ in told[1]]
    assert {one.type for one in resolve(str(packed)).tensors.values()} >= {"MXFP4"}


@pytest.mark.model
def test_a_mixture_in_four_bits_reads_the_experts_it_uses_and_answers_alike_in_company(tmp_path: Path) -> None:
    shape = BenchMixture(
        2, hidden=256, heads=4, kv_heads=2, head_size=64, experts=6, used=2, wide=256, vocabulary=49_300
    )
    file = tmp_path / "mixture.gguf"
    write_mixture(file, shape)
    runner = load_runner(file, memory_bytes=8 << 30, max_sequence_tokens=256, dtype="auto")
    prompts = prompts_of(7, seed=2)
    alone = [answers(runner, [prompt])[0] for prompt in prompts]
    assert answers(runner, prompts) == alone
    expert_bytes = 3 * 256 * 256 // 256 * 144
    every = {name: one.num_bytes for name, one in resolve(str(file)).tensors.items() if len(one.shape) > 1}
    experts = sum(num for name, num in every.items() if "experts" in name)
    assert experts == 2 * 6 * expert_bytes
    rest = sum(every.values()) - experts - every["model.embed_tokens.weight"]
    assert active_bytes(file) == rest + 2 * 2 * expert_bytes
