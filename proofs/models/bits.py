"""The same bits in any circumstance, for what families have beyond Llama: experts, windows, sinks, shared keys.

By hand (`native_bits`): logits of whole sequences in chunks, on one thread, after hits, resumed, in company. By the
engine: sampled answers with their log-probabilities, two of each prompt by a fork, chunked, preempted, on one thread.
Mixtures are asked a second time with their weights in 8 bits and integer products.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from benchmarks.steps import BLOCK, make_runner, make_store
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_converter import convert
from proofs.numerics.native_bits import Desk, Pairs, known_of, mixed_ways, other_ways, together
from quire.backends.cpu.decoder import Decoder
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, random_params

LEAST_PAIRS = 2_000
NUM_BLOCKS = 600
MIXTURES = ("qwen3-moe", "gpt-oss", "gemma4-moe", "mixtral")
FORKS = 2


@section("the same bits in any circumstance")
def same_bits(proof: Proof) -> None:
    """Every model of the newer families, and mixtures in 8 bits."""
    pairs, num_forks = Pairs(), 0
    for name, model in _models(proof):
        desk = Desk(proof.random, model, NUM_BLOCKS)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=12))]
        known = [known_of(desk, text) for text in texts]
        for one in known:
            other_ways(desk, pairs, one)
        for size in (2, len(known)):
            together(desk, pairs, proof.random.sample(known, size))
        num_forks += answers_in_other_ways(proof.random, pairs, name, model, proof.sized(quick=3, full=8))
    for kind in ("one_thread", "prefix_hit", "resumed"):
        proof.at_least(f"bitexact_{kind}", pairs.counts[kind], proof.sized(quick=1, full=100))
    report_pairs(proof, pairs, num_forks)


def report_pairs(proof: Proof, pairs: Pairs, num_forks: int) -> None:
    """How many were compared, and how many were not the same."""
    proof.report("bitexact_forks", num_forks, "answers that began as copies of another")
    answers = sum(count for kind, count in pairs.counts.items() if kind.startswith("answers"))
    proof.at_least("bitexact_answers", answers, proof.sized(quick=1, full=100), "chunked, preempted, on one thread")
    proof.at_least("bitexact_pairs", pairs.counts.total(), proof.sized(quick=1, full=LEAST_PAIRS))
    proof.equals("bitexact_mismatches", pairs.wrong, 0)


def _models(proof: Proof) -> Iterator[tuple[str, Decoder]]:
    names = architectures.TODAY if proof.is_full else MIXTURES
    for name in names:
        yield name, load_decoder(architectures.directory(name), **FLOAT32, **_sizes())
    for name in MIXTURES if proof.is_full else MIXTURES[:1]:
        file = convert(architectures.directory(name), _file(proof.folder, name), "MOSTLY_Q8_0")
        yield f"{name} in 8 bits", load_decoder(file, **AUTO, **_sizes())


def _sizes() -> dict[str, int]:
    return {"max_sequence_tokens": 4096}


def _file(folder: Path, name: str) -> Path:
    return folder / f"bits-{name}.gguf"


def _text(random: Random) -> list[int]:
    return [random.randrange(3, architectures.VOCABULARY_SIZE) for _ in range(random.randint(2, 6 * BLOCK))]


def answers_in_other_ways(random: Random, pairs: Pairs, name: str, model: Decoder, count: int) -> int:
    """Sampled answers of a group of requests, alone and in three other ways; how many were forked."""
    runner = make_runner(model, make_store(model, NUM_BLOCKS))
    asks = []
    for _ in range(count):
        params = msgspec.structs.replace(random_params(random, 16), logprobs=random.choice([0, 1, 5]))
        asks.append(Ask(_text(random), params, random.getrandbits(63), n=random.choice([1, FORKS])))
    for ask in asks:
        Machine(runner).alone(ask)
    for one, other in mixed_ways(runner, random, asks):
        pairs.judge(f"answers of {name}", told_of(other), told_of(one))
    return 3 * sum(ask.n == FORKS for ask in asks)


def told_of(ask: Ask) -> list[bytes]:
    """All that an ask was answered, one entry for each answer."""
    return [repr((ask.answers[at], ask.logprobs[at])).encode() for at in sorted(ask.answers)]
