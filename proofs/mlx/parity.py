"""Compares tokens on MLX with those of mlx-lm, and with those of the CPU backend on the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.record import say
from benchmarks.steps import real_text
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, section
from quire.backends.protocol import Runner
from quire.core.request import ResolvedSampling
from tests.support.models.mlx_models import MODELS, SETTINGS, VOCABULARY_SIZE, Reference, made_by_mlx
from tests.support.models.models import Ask, Machine, load_runner

NEAR_TIE = 1e-3
"""Logits with a smaller difference, relative to the largest of their row, are a tie that rounding decides."""
ARCHITECTURES = ("llama", "qwen2", "qwen3-moe", "gemma3", "gpt-oss", "gemma4")
SHARED = ("llama-native", "mistral-native", "qwen3-native", "qwen3-moe", "gemma3", "olmo3", "phi4", "granite")
"""Models that both backends run from the same files."""
MIN_SAME_SHARE = 0.99


@dataclass
class ComparisonCounts:
    """Counts of compared prompts and tokens, and of differences."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_same: int = 0
    num_near_ties: int = 0
    num_mismatches: int = 0

    def compare(self, reference: Reference, ask: Ask, expected: Sequence[int]) -> None:
        """Compare tokens up to the first difference; later ones are not comparable."""
        tokens = list(ask.tokens)
        self.num_prompts += 1
        self.num_tokens += len(expected)
        if tokens == list(expected):
            self.num_same += 1
            return
        index = next(index for index, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1])
        logits = np.array(reference.logits([*ask.prompt, *expected[:index]]))
        gap = abs(float(logits[tokens[index]] - logits[expected[index]])) / float(np.abs(logits).max())
        is_near = gap <= NEAR_TIE
        self.num_near_ties += is_near
        self.num_mismatches += not is_near
        if not is_near:
            say(f"  token {index}: expected {expected[index]}, got {tokens[index]}; their logits differ by {gap:.2g}")


def _generate(runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int, random: Random) -> list[Ask]:
    """Generate answers in batches of random sizes, with prefix hits of earlier batches."""
    asks = [Ask(prompt, ResolvedSampling(temperature=0.0, max_tokens=num_tokens)) for prompt in prompts]
    remaining, machine = random.sample(asks, len(asks)), Machine(runner, max_running=8)
    while remaining:
        count = random.randint(1, 8)
        machine.run(remaining[:count])
        remaining = remaining[count:]
    return asks


def _noise(random: Random, count: int, longest: int = 120) -> list[list[int]]:
    return [[random.randrange(3, VOCABULARY_SIZE) for _ in range(random.randint(1, longest))] for _ in range(count)]


def _compare_with_mlx_lm(proof: Proof, counts: ComparisonCounts, directory: Path, name: str) -> None:
    count, length = proof.sized(quick=4, full=24), proof.sized(quick=8, full=32)
    reference = Reference(directory)
    asks = _generate(load_runner(directory, **SETTINGS), _noise(proof.random, count), length, proof.random)
    for ask in asks:
        counts.compare(reference, ask, reference.answer(ask.prompt, len(ask.tokens)))
    say(f"  {name}: {counts}")


@section("parity with mlx-lm")
def parity(proof: Proof) -> None:
    """Greedy tokens of six architectures in float32, and of SmolLM2 in its own type."""
    counts = ComparisonCounts()
    for name in ARCHITECTURES if proof.is_full else ARCHITECTURES[:3]:
        _compare_with_mlx_lm(proof, counts, made_by_mlx(name), name)
    text, directory = real_text(), smollm2_directory()
    num_prompts, num_tokens = proof.sized(quick=2, full=8), proof.sized(quick=4, full=16)
    offsets = [proof.random.randrange(len(text) - 64) for _ in range(num_prompts)]
    prompts = [text[offset : offset + proof.random.randint(2, 24)] for offset in offsets]
    runner = load_runner(directory, **{**SETTINGS, "max_sequence_tokens": 256, "max_running": 8})
    reference, real = Reference(directory), ComparisonCounts()
    for ask in _generate(runner, prompts, num_tokens, proof.random):
        real.compare(reference, ask, reference.answer(ask.prompt, len(ask.tokens)))
    proof.report("parity_tokens", counts.num_tokens + real.num_tokens)
    proof.report("parity_near_ties", counts.num_near_ties, "counted separately")
    proof.equals("parity_mismatches", counts.num_mismatches, 0)
    proof.equals("parity_smollm2", real.num_prompts - real.num_same, 0, f"of {num_prompts}, near ties too")


@section("quantised by mlx-lm")
def quantised(proof: Proof) -> None:
    """Checkpoints of 4 and 8 bits by mlx-lm's converter, compared with mlx-lm on the same file."""
    counts = ComparisonCounts()
    for name in MODELS if proof.is_full else ("llama", "gpt-oss"):
        for bits in (4, 8):
            _compare_with_mlx_lm(proof, counts, made_by_mlx(name, bits), f"{name}, {bits} bits")
    proof.report("quantised_tokens", counts.num_tokens)
    proof.report("quantised_near_ties", counts.num_near_ties, "counted separately")
    proof.equals("quantised_mismatches", counts.num_mismatches, 0)


@section("beside the CPU backend")
def cross_backend(proof: Proof) -> None:
    """The share of prompts with equal greedy tokens on both backends, with the same float32 weights."""
    from tests.support.models import architectures  # noqa: PLC0415 - needs torch, which the other sections do not

    counts = ComparisonCounts()
    names = SHARED if proof.is_full else SHARED[:3]
    num_prompts = -(-proof.sized(quick=12, full=200) // len(names))
    for name in names:
        directory, prompts = architectures.directory(name), _noise(proof.random, num_prompts)
        cpu, mlx = (
            _generate(load_runner(directory, **{**SETTINGS, "backend": backend}), prompts, 32, proof.random)
            for backend in ("cpu", "mlx")
        )
        reference = Reference(directory)
        for ask, cpu_ask in zip(mlx, cpu, strict=True):
            counts.compare(reference, ask, list(cpu_ask.tokens))
        say(f"  {name}: {counts}")
    proof.report("cross_prompts", counts.num_prompts)
    proof.at_least("cross_backend", counts.num_same / counts.num_prompts, MIN_SAME_SHARE, "prompts with equal tokens")
    proof.equals("cross_mismatches", counts.num_mismatches, 0, "differences that are no near ties")
