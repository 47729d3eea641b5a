"""The same bits in any circumstance: logits of whole sequences, sampled answers, one greedy answer a thousand times.

Sequences are fed without a scheduler, so that every batch and chunk is exactly the intended one. The logits of each row
become a digest of their bytes, which is stricter than comparing numbers and small enough to store for every sequence.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import msgspec
import numpy as np

from benchmarks.record import say
from benchmarks.steps import BLOCK, MAX_STEP_TOKENS, make_runner, make_store, real_text, smollm2_model
from proofs.framework.proof import Proof, section
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.state_store import StateStore
from quire.backends.host.batch import make_batch
from quire.backends.kernels.threads import num_threads, use_threads
from quire.backends.protocol import Runner
from quire.config import Dtype
from quire.core.memory.state_slots import ZERO_SLOT
from quire.core.request import ResolvedSampling
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import WorkItem
from tests.support.models.models import Ask, Machine, random_params, texts_of

BATCHES = (2, 7, 16, 33, 64)
CHUNKS = (32, 64, 96)
LONGEST = 4_000
LONGEST_TOKEN_BY_TOKEN = 256
LEAST_PAIRS = 2_000
LEAST_OF_EACH = 150
NUM_BLOCKS = 4_000


class Harness:
    """Runs a model and a KV store without a scheduler, and returns a digest of each row's logits."""

    states: StateStore | None = None
    """The state store of models with recurrent layers."""

    def __init__(
        self, random: Random, model: Decoder | None = None, num_blocks: int = NUM_BLOCKS, dtype: Dtype = "float32"
    ) -> None:
        self.random = random
        self._model = model or smollm2_model()
        self._store = make_store(self._model, num_blocks, dtype)
        self.free = random.sample(range(1, num_blocks + 1), num_blocks)
        self._hashers = ThreadPoolExecutor(2)

    def feed(self, items: Sequence[WorkItem]) -> list[list[bytes]]:
        """Run one step, and return the digests of its rows' logits, item by item."""
        batch = make_batch(items, BLOCK)
        num_rows = sum(len(item.token_ids) for item in items)
        logits = self._model.compute(batch, self._store, np.arange(num_rows), states=self.states).logits
        digests = list(self._hashers.map(lambda row: blake2b(row, digest_size=16).digest(), logits))
        ends = [first + len(item.token_ids) for first, item in zip(batch.first_rows, items, strict=True)]
        return [digests[first:end] for first, end in zip(batch.first_rows, ends, strict=True)]

    @contextmanager
    def blocks(self, num_tokens: int) -> Iterator[list[int]]:
        """Random blocks for so many tokens; they are returned to the free list in another order."""
        count = -(-num_tokens // BLOCK)
        blocks, self.free = self.free[:count], self.free[count:]
        yield list(blocks)
        self.free += self.random.sample(blocks, count)
        self.random.shuffle(self.free)


@dataclass
class FedSequence:
    """One sequence: its tokens, its blocks, the number of computed tokens, and the digests of their rows."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    digests: list[bytes] = field(default_factory=list)
    slot: int = ZERO_SLOT

    @property
    def num_remaining(self) -> int:
        return len(self.tokens) - self.done

    def item(self, number: int, count: int) -> WorkItem:
        end = min(self.done + count, len(self.tokens))
        fed = tuple(self.tokens[self.done : end])
        return WorkItem(number, fed, self.done, tuple(self.blocks), state_slot=self.slot)

    def append(self, digests: list[bytes]) -> None:
        self.digests += digests
        self.done += len(digests)

    def run(self, harness: Harness, size: int = MAX_STEP_TOKENS, until: int | None = None) -> "FedSequence":
        """Compute the sequence alone, in chunks of this size."""
        until = len(self.tokens) if until is None else until
        while self.done < until:
            self.append(harness.feed([self.item(0, min(size, until - self.done))])[0])
        return self


@dataclass
class Reference:
    """A sequence, and the digests of its rows when computed alone in one piece."""

    tokens: list[int]
    digests: list[bytes]


class Pairs:
    """Counts comparisons by circumstance, and those that differed."""

    def __init__(self) -> None:
        self.counts, self.wrong = Counter[str](), 0

    def compare(self, kind: str, digests: list[bytes], expected: list[bytes]) -> None:
        self.counts[kind] += 1
        if digests != expected:
            self.wrong += 1
            rows = enumerate(zip(digests, expected, strict=False))
            row = next((row for row, pair in rows if pair[0] != pair[1]), -1)
            say(f"  not the same bits: {kind}, {len(expected)} rows, first at row {row}")


@section("the same bits in any circumstance")
def bit_exact(proof: Proof) -> None:
    """Compare all logits of many sequences in every circumstance that the promise names."""
    random, harness, pairs = proof.random, Harness(proof.random), Pairs()
    longest = LONGEST if proof.is_full else 160
    texts = _texts(random, longest, proof.sized(quick=64, full=LEAST_OF_EACH))
    references = [reference_of(harness, text) for text in texts]
    for expected in references if proof.is_full else references[:8]:
        compare_alone(harness, pairs, expected)
    short = min(longest, LONGEST_TOKEN_BY_TOKEN)
    for tokens in _texts(random, short, proof.sized(quick=8, full=LEAST_OF_EACH)):
        expected = reference_of(harness, tokens)
        with harness.blocks(len(tokens)) as blocks:
            pairs.compare("token_by_token", FedSequence(tokens, blocks).run(harness, 1).digests, expected.digests)
    for size in BATCHES:
        for _ in range(-(-LEAST_OF_EACH // size) if proof.is_full else 1):
            compare_batch(harness, pairs, random.sample(references, size))
    for kind, count in sorted(pairs.counts.items()):
        proof.at_least(f"bitexact_{kind}", count, proof.sized(quick=0, full=LEAST_OF_EACH))
    proof.at_least("bitexact_pairs", pairs.counts.total(), proof.sized(quick=0, full=LEAST_PAIRS))
    proof.equals("bitexact_mismatches", pairs.wrong, 0)


def _texts(random: Random, longest: int, count: int) -> list[list[int]]:
    """Pieces of real text whose lengths are log-uniform from 2."""
    lengths = [round(math.exp(random.uniform(math.log(2), math.log(longest)))) for _ in range(count)]
    return texts_of(random, real_text(), lengths)


def reference_of(harness: Harness, tokens: list[int]) -> Reference:
    """Compute these tokens alone in one piece."""
    with harness.blocks(len(tokens)) as blocks:
        return Reference(tokens, FedSequence(tokens, blocks).run(harness).digests)


def compare_alone(harness: Harness, pairs: Pairs, expected: Reference) -> None:
    """Compare one sequence in chunks, on one thread, after prefix hits, and after a preemption."""
    tokens = expected.tokens
    for size in CHUNKS:
        with harness.blocks(len(tokens)) as blocks:
            pairs.compare(f"chunks_{size}", FedSequence(tokens, blocks).run(harness, size).digests, expected.digests)
    with harness.blocks(len(tokens)) as blocks:
        with threads(1):
            sequence = FedSequence(tokens, blocks).run(harness)
        pairs.compare("one_thread", sequence.digests, expected.digests)
        for _ in range(2):
            shared = harness.random.randint(0, (len(tokens) - 1) // BLOCK)
            rest = _digests_after(harness, tokens, blocks[:shared])
            pairs.compare("prefix_hit", rest, expected.digests[shared * BLOCK :])
    stop = harness.random.randint(1, len(tokens))
    with harness.blocks(stop) as blocks:
        stopped = FedSequence(tokens, blocks).run(harness, until=stop)
        # Some of its full blocks stay cached; the rest, and always the last token, is computed again in new blocks.
        num_cached = harness.random.randint(0, min(stop, len(tokens) - 1) // BLOCK)
        rest = _digests_after(harness, tokens, blocks[:num_cached])
        expected_rest = expected.digests[num_cached * BLOCK :]
        pairs.compare("resumed", stopped.digests + rest, expected.digests[:stop] + expected_rest)


def _digests_after(harness: Harness, tokens: list[int], cached: list[int]) -> list[bytes]:
    """Return the digests of the tokens after these cached blocks."""
    num_cached = len(cached) * BLOCK
    with harness.blocks(len(tokens) - num_cached) as new_blocks:
        return FedSequence(tokens, [*cached, *new_blocks], num_cached).run(harness).digests


def compare_batch(harness: Harness, pairs: Pairs, batch: Sequence[Reference]) -> None:
    """Compare sequences that run in one batch until all are computed; each step feeds one token or a chunk of each."""
    with harness.blocks(sum(BLOCK * -(-len(expected.tokens) // BLOCK) for expected in batch)) as blocks:
        sequences = []
        for expected in batch:
            count = -(-len(expected.tokens) // BLOCK)
            sequences.append(FedSequence(expected.tokens, blocks[:count]))
            del blocks[:count]
        while unfinished := [sequence for sequence in sequences if sequence.num_remaining]:
            budget, parts = MAX_STEP_TOKENS - len(unfinished), []
            for sequence in harness.random.sample(unfinished, len(unfinished)):
                count = min(harness.random.choice([1, 1, 7, 33, 128, 512]), budget + 1, sequence.num_remaining)
                budget -= count - 1
                parts.append((sequence, count))
            fed = harness.feed([sequence.item(index, count) for index, (sequence, count) in enumerate(parts)])
            for (sequence, _), digests in zip(parts, fed, strict=True):
                sequence.append(digests)
    for sequence, expected in zip(sequences, batch, strict=True):
        pairs.compare(f"batch_{len(batch)}", sequence.digests, expected.digests)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use so many threads while the block runs."""
    before = num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


# -- answers -----------------------------------------------------------------------------------------------------------


def _runner() -> Runner:
    return make_runner(smollm2_model(), make_store(smollm2_model(), 2_000))


@section("sampled tokens")
def sampled(proof: Proof) -> None:
    """Seeded answers with log-probabilities: alone, and in batches, in chunks, after hits and on one thread."""
    random, runner, sizes = proof.random, _runner(), BATCHES if proof.is_full else (2, 7)
    count = sum(sizes)
    prompts = texts_of(random, real_text(), [random.randint(1, 300) for _ in range(count)])
    asks = [
        Ask(
            prompt,
            msgspec.structs.replace(random_params(random, 16), logprobs=random.choice([0, 1, 5])),
            random.getrandbits(63),
        )
        for prompt in prompts
    ]
    for ask in asks:
        Machine(runner).alone(ask)
    mixed, first = [], 0
    for size in sizes:
        group, first = asks[first : first + size], first + size
        mixed += run_in_batches(runner, random, group)
    num_wrong = sum((a.tokens, a.logprobs) != (b.tokens, b.logprobs) for a, b in mixed)
    proof.report("sampled_pairs", len(mixed))
    proof.equals("sampled_mismatches", num_wrong, 0)


def run_in_batches(runner: Runner, random: Random, group: list[Ask]) -> list[tuple[Ask, Ask]]:
    """Run a group of requests in one batch: in small chunks, with hits and preemptions, and on one thread."""

    def copies() -> list[Ask]:
        return [Ask(ask.prompt, ask.params, ask.seed, ask.n) for ask in group]

    def machine(**settings: int) -> Machine:
        return Machine(runner, max_running=len(group), **settings)

    chunked, preempted, one_threaded = copies(), copies(), copies()
    machine(max_step_tokens=len(group) + BLOCK + random.randint(0, 100)).run(random.sample(chunked, len(chunked)))
    warm_machine = machine()
    heads = [
        Ask(ask.prompt[: random.randint(1, len(ask.prompt))], ResolvedSampling(max_tokens=1)) for ask in group[::2]
    ]
    warm_machine.run(heads)

    def preempt_sometimes() -> None:
        if random.random() < 0.3:
            warm_machine.engine.scheduler.preempt_latest()

    warm_machine.run(random.sample(preempted, len(preempted)), preempt_sometimes)
    with threads(1):
        machine().run(random.sample(one_threaded, len(one_threaded)))
    return [pair for answers in (chunked, preempted, one_threaded) for pair in zip(group, answers, strict=True)]


@section("one completion")
def one_completion(proof: Proof) -> None:
    """One greedy request many times, among other requests, in engines with various maximum batch sizes."""
    random, runner = proof.random, _runner()
    params = ResolvedSampling(temperature=0.0, max_tokens=24)
    prompt = texts_of(random, real_text(), [90])[0]
    copies = [Ask(prompt, params) for _ in range(proof.sized(quick=40, full=1_000))]
    others = [Ask(one, params) for one in texts_of(random, real_text(), [random.randint(1, 200) for _ in copies[::3]])]
    mixed = random.sample([*copies, *others], len(copies) + len(others))
    queue = QueueConfig(max_requests=4_096)
    while mixed:
        size = random.randint(1, 200)
        batch, mixed = mixed[:size], mixed[size:]
        Machine(runner, max_running=random.randint(3, 60), queue=queue).run(batch)
    distinct = len({tuple(copy.tokens) for copy in copies})
    proof.report("one_completion_copies", len(copies))
    proof.equals("one_completion", distinct, 1)
