"""The same bits in any circumstance, for features of families beyond Llama: experts, windows, sinks, shared keys.

Without a scheduler (`native_bits`): logits of sequences in chunks, on one thread, after hits, resumed, in a batch. With
the engine: sampled answers with log-probabilities, some forked, in chunks, preempted, and on one thread. Mixtures of
experts run a second time with 8-bit weights and integer products.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from benchmarks.steps import BLOCK, make_runner, make_store
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_converter import convert
from proofs.numerics.native_bits import Harness, Pairs, compare_alone, compare_batch, reference_of, run_in_batches
from quire.backends.cpu.decoder import Decoder
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, random_params

LEAST_PAIRS = 2_000
NUM_BLOCKS = 600
MIXTURES = ("qwen3-moe", "gpt-oss", "gemma4-moe", "mixtral")
FORKS = 2


@section("the same bits in any circumstance")
def same_bits(proof: Proof) -> None:
    """Every model of the newer families, and mixtures of experts in 8 bits."""
    pairs, num_forks = Pairs(), 0
    for name, model in _models(proof):
        harness = Harness(proof.random, model, NUM_BLOCKS)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=12))]
        references = [reference_of(harness, text) for text in texts]
        for reference in references:
            compare_alone(harness, pairs, reference)
        for size in (2, len(references)):
            compare_batch(harness, pairs, proof.random.sample(references, size))
        num_forks += compare_answers(proof.random, pairs, name, model, proof.sized(quick=3, full=8))
    for kind in ("one_thread", "prefix_hit", "resumed"):
        proof.at_least(f"bitexact_{kind}", pairs.counts[kind], proof.sized(quick=1, full=100))
    report_pairs(proof, pairs, num_forks)


def report_pairs(proof: Proof, pairs: Pairs, num_forks: int) -> None:
    """Report the numbers of comparisons, forks and mismatches."""
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


def compare_answers(random: Random, pairs: Pairs, name: str, model: Decoder, count: int) -> int:
    """Compare sampled answers alone with those in three kinds of batches; return the number of forked ones."""
    runner = make_runner(model, make_store(model, NUM_BLOCKS))
    asks = []
    for _ in range(count):
        params = msgspec.structs.replace(random_params(random, 16), logprobs=random.choice([0, 1, 5]))
        asks.append(Ask(_text(random), params, random.getrandbits(63), n=random.choice([1, FORKS])))
    for ask in asks:
        Machine(runner).alone(ask)
    for alone, batched in run_in_batches(runner, random, asks):
        pairs.compare(f"answers of {name}", answer_bytes(batched), answer_bytes(alone))
    return 3 * sum(ask.n == FORKS for ask in asks)


def answer_bytes(ask: Ask) -> list[bytes]:
    """Return tokens and log-probabilities of each answer of a request."""
    return [repr((ask.answers[index], ask.logprobs[index])).encode() for index in sorted(ask.answers)]
