"""Tokens on MLX against mlx-lm's own, and against the CPU backend on the same weights."""

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
"""Two logits so near, over the largest of their row, are a tie that roundings decide."""
SIX = ("llama", "qwen2", "qwen3-moe", "gemma3", "gpt-oss", "gemma4")
SHARED = ("llama-native", "mistral-native", "qwen3-native", "qwen3-moe", "gemma3", "olmo3", "phi4", "granite")
"""Models that both backends run, from the same files."""
LEAST_SAME = 0.99


@dataclass
class Compared:
    """Prompts and tokens, and what differed."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_same: int = 0
    num_near_ties: int = 0
    num_mismatches: int = 0

    def judge(self, reference: Reference, ask: Ask, expected: Sequence[int]) -> None:
        """The first token that differs is what counts; behind it nothing is comparable."""
        got = list(ask.tokens)
        self.num_prompts += 1
        self.num_tokens += len(expected)
        if got == list(expected):
            self.num_same += 1
            return
        at = next(at for at, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1])
        logits = np.array(reference.logits([*ask.prompt, *expected[:at]]))
        gap = abs(float(logits[got[at]] - logits[expected[at]])) / float(np.abs(logits).max())
        is_near = gap <= NEAR_TIE
        self.num_near_ties += is_near
        self.num_mismatches += not is_near
        if not is_near:
            say(f"  a prompt of {len(ask.prompt)}, token {at}: {got[at]}, expected {expected[at]}, apart by {gap:.2g}")


def _answered(runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int, random: Random) -> list[Ask]:
    """In batches of any size, with whatever the cache has by then."""
    asks = [Ask(prompt, ResolvedSampling(temperature=0.0, max_tokens=num_tokens)) for prompt in prompts]
    left, machine = random.sample(asks, len(asks)), Machine(runner, max_running=8)
    while left:
        count = random.randint(1, 8)
        machine.run(left[:count])
        left = left[count:]
    return asks


def _noise(random: Random, count: int, longest: int = 120) -> list[list[int]]:
    return [[random.randrange(3, VOCABULARY_SIZE) for _ in range(random.randint(1, longest))] for _ in range(count)]


def _against_mlx_lm(proof: Proof, found: Compared, directory: Path, name: str) -> None:
    count, length = proof.sized(quick=4, full=24), proof.sized(quick=8, full=32)
    reference = Reference(directory)
    asks = _answered(load_runner(directory, **SETTINGS), _noise(proof.random, count), length, proof.random)
    for ask in asks:
        found.judge(reference, ask, reference.answer(ask.prompt, len(ask.tokens)))
    say(f"  {name}: {found}")


@section("parity with mlx-lm")
def parity(proof: Proof) -> None:
    """Greedy tokens of six architectures in float32, and of SmolLM2 in its own type."""
    found = Compared()
    for name in SIX if proof.is_full else SIX[:3]:
        _against_mlx_lm(proof, found, made_by_mlx(name), name)
    text, directory = real_text(), smollm2_directory()
    num_prompts, num_tokens = proof.sized(quick=2, full=8), proof.sized(quick=4, full=16)
    firsts = [proof.random.randrange(len(text) - 64) for _ in range(num_prompts)]
    prompts = [text[first : first + proof.random.randint(2, 24)] for first in firsts]
    runner = load_runner(directory, **{**SETTINGS, "max_sequence_tokens": 256, "max_running": 8})
    reference, real = Reference(directory), Compared()
    for ask in _answered(runner, prompts, num_tokens, proof.random):
        real.judge(reference, ask, reference.answer(ask.prompt, len(ask.tokens)))
    proof.report("parity_tokens", found.num_tokens + real.num_tokens)
    proof.report("parity_near_ties", found.num_near_ties, "counted apart")
    proof.equals("parity_mismatches", found.num_mismatches, 0)
    proof.equals("parity_smollm2", real.num_prompts - real.num_same, 0, f"of {num_prompts} prompts; no tie is passed")


@section("quantised by mlx-lm")
def quantised(proof: Proof) -> None:
    """Checkpoints of 4 and 8 bits by its converter, against mlx-lm on the same file."""
    found = Compared()
    for name in MODELS if proof.is_full else ("llama", "gpt-oss"):
        for bits in (4, 8):
            _against_mlx_lm(proof, found, made_by_mlx(name, bits), f"{name}, {bits} bits")
    proof.report("quantised_tokens", found.num_tokens)
    proof.report("quantised_near_ties", found.num_near_ties, "counted apart")
    proof.equals("quantised_mismatches", found.num_mismatches, 0)


@section("beside the CPU backend")
def cross_backend(proof: Proof) -> None:
    """The same float32 weights on both: prompts whose greedy tokens are all the same."""
    from tests.support.models import architectures  # noqa: PLC0415 - only here torch is needed, which makes these models

    found = Compared()
    names = SHARED if proof.is_full else SHARED[:3]
    each = -(-proof.sized(quick=12, full=200) // len(names))
    for name in names:
        directory, prompts = architectures.directory(name), _noise(proof.random, each)
        cpu, mlx = (
            _answered(load_runner(directory, **{**SETTINGS, "backend": backend}), prompts, 32, proof.random)
            for backend in ("cpu", "mlx")
        )
        reference = Reference(directory)
        for one, other in zip(mlx, cpu, strict=True):
            found.judge(reference, one, list(other.tokens))
        say(f"  {name}: {found}")
    proof.report("cross_prompts", found.num_prompts)
    proof.at_least("cross_backend", found.num_same / found.num_prompts, LEAST_SAME, "prompts with the same tokens")
    proof.equals("cross_mismatches", found.num_mismatches, 0, "that are no near-ties")
