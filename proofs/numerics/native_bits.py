"""The same bits in any circumstance: logits of whole sequences, sampled answers, one greedy answer a thousand times.

Sequences are fed by hand, so that every circumstance is the one that is named. Every row's logits become a digest of
their bytes: stricter than comparing numbers, and small enough to keep the reference of every sequence.
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


class Desk:
    """A model and a store, fed by hand; every row's logits become a digest."""

    states: StateStore | None = None
    """Of models that have recurrent layers."""

    def __init__(
        self, random: Random, model: Decoder | None = None, num_blocks: int = NUM_BLOCKS, dtype: Dtype = "float32"
    ) -> None:
        self.random = random
        self._model = model or smollm2_model()
        self._store = make_store(self._model, num_blocks, dtype)
        self.free = random.sample(range(1, num_blocks + 1), num_blocks)
        self._hashers = ThreadPoolExecutor(2)

    def feed(self, items: Sequence[WorkItem]) -> list[list[bytes]]:
        """Digests of the logits of every fed row, item by item."""
        batch = make_batch(items, BLOCK)
        num_rows = sum(len(item.token_ids) for item in items)
        logits = self._model.compute(batch, self._store, np.arange(num_rows), states=self.states).logits
        digests = list(self._hashers.map(lambda row: blake2b(row, digest_size=16).digest(), logits))
        ends = [first + len(item.token_ids) for first, item in zip(batch.first_rows, items, strict=True)]
        return [digests[first:end] for first, end in zip(batch.first_rows, ends, strict=True)]

    @contextmanager
    def blocks(self, num_tokens: int) -> Iterator[list[int]]:
        """Blocks for so many tokens, in no order, given back in another."""
        count = -(-num_tokens // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        yield list(taken)
        self.free += self.random.sample(taken, count)
        self.random.shuffle(self.free)


@dataclass
class Life:
    """One sequence, its blocks, how far it is, and the digests of its rows so far."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    digests: list[bytes] = field(default_factory=list)
    slot: int = ZERO_SLOT

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.done

    def item(self, number: int, count: int) -> WorkItem:
        end = min(self.done + count, len(self.tokens))
        fed = tuple(self.tokens[self.done : end])
        return WorkItem(number, fed, self.done, tuple(self.blocks), state_slot=self.slot)

    def take(self, digests: list[bytes]) -> None:
        self.digests += digests
        self.done += len(digests)

    def run(self, desk: Desk, size: int = MAX_STEP_TOKENS, until: int | None = None) -> "Life":
        """Alone, in chunks of this size."""
        until = len(self.tokens) if until is None else until
        while self.done < until:
            self.take(desk.feed([self.item(0, min(size, until - self.done))])[0])
        return self


@dataclass
class Known:
    """What was fed, and the digests of its rows alone and whole."""

    tokens: list[int]
    digests: list[bytes]


class Pairs:
    """Counts circumstances and what differed in them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong = 0

    def judge(self, kind: str, found: list[bytes], expected: list[bytes]) -> None:
        self.counts[kind] += 1
        if found != expected:
            self.wrong += 1
            at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
            say(f"  not the same bits: {kind}, {len(expected)} rows, first at row {at}")


@section("the same bits in any circumstance")
def bit_exact(proof: Proof) -> None:
    """Every circumstance the promise names, each often enough; all logits of every sequence in each."""
    random = proof.random
    desk, pairs = Desk(random), Pairs()
    longest = LONGEST if proof.is_full else 160
    known = [known_of(desk, one) for one in _texts(random, longest, proof.sized(quick=64, full=LEAST_OF_EACH))]
    for one in known if proof.is_full else known[:8]:
        other_ways(desk, pairs, one)
    short = min(longest, LONGEST_TOKEN_BY_TOKEN)
    for tokens in _texts(random, short, proof.sized(quick=8, full=LEAST_OF_EACH)):
        one = known_of(desk, tokens)
        with desk.blocks(len(tokens)) as blocks:
            pairs.judge("token_by_token", Life(tokens, blocks).run(desk, 1).digests, one.digests)
    for size in BATCHES:
        for _ in range(-(-LEAST_OF_EACH // size) if proof.is_full else 1):
            together(desk, pairs, random.sample(known, size))
    for kind, count in sorted(pairs.counts.items()):
        proof.at_least(f"bitexact_{kind}", count, proof.sized(quick=0, full=LEAST_OF_EACH))
    proof.at_least("bitexact_pairs", pairs.counts.total(), proof.sized(quick=0, full=LEAST_PAIRS))
    proof.equals("bitexact_mismatches", pairs.wrong, 0)


def _texts(random: Random, longest: int, count: int) -> list[list[int]]:
    """Pieces of real text whose lengths are log-uniform from 2."""
    lengths = [round(math.exp(random.uniform(math.log(2), math.log(longest)))) for _ in range(count)]
    return texts_of(random, real_text(), lengths)


def known_of(desk: Desk, tokens: list[int]) -> Known:
    """The digests of this text alone and whole."""
    with desk.blocks(len(tokens)) as blocks:
        return Known(tokens, Life(tokens, blocks).run(desk).digests)


def other_ways(desk: Desk, pairs: Pairs, one: Known) -> None:
    """One sequence in chunks, on one thread, after hits, after a preemption."""
    tokens = one.tokens
    for size in CHUNKS:
        with desk.blocks(len(tokens)) as blocks:
            pairs.judge(f"chunks_{size}", Life(tokens, blocks).run(desk, size).digests, one.digests)
    with desk.blocks(len(tokens)) as blocks:
        with threads(1):
            life = Life(tokens, blocks).run(desk)
        pairs.judge("one_thread", life.digests, one.digests)
        for _ in range(2):
            shared = desk.random.randint(0, (len(tokens) - 1) // BLOCK)
            rest = _again_from(desk, tokens, blocks[:shared])
            pairs.judge("prefix_hit", rest, one.digests[shared * BLOCK :])
    stop = desk.random.randint(1, len(tokens))
    with desk.blocks(stop) as blocks:
        first = Life(tokens, blocks).run(desk, until=stop)
        # Some of its full blocks survive; the rest is computed again elsewhere. The last token always is.
        kept = desk.random.randint(0, min(stop, len(tokens) - 1) // BLOCK)
        again = _again_from(desk, tokens, blocks[:kept])
        pairs.judge("resumed", first.digests + again, one.digests[:stop] + one.digests[kept * BLOCK :])


def _again_from(desk: Desk, tokens: list[int], kept: list[int]) -> list[bytes]:
    """The digests of what comes after blocks that are there already."""
    done = len(kept) * BLOCK
    with desk.blocks(len(tokens) - done) as fresh:
        return Life(tokens, [*kept, *fresh], done).run(desk).digests


def together(desk: Desk, pairs: Pairs, batch: Sequence[Known]) -> None:
    """All in every step until they are done, some feeding one token and some a chunk."""
    with desk.blocks(sum(BLOCK * -(-len(one.tokens) // BLOCK) for one in batch)) as blocks:
        lives = []
        for one in batch:
            count = -(-len(one.tokens) // BLOCK)
            lives.append(Life(one.tokens, blocks[:count]))
            del blocks[:count]
        while waiting := [life for life in lives if life.num_left]:
            budget, chosen = MAX_STEP_TOKENS - len(waiting), []
            for life in desk.random.sample(waiting, len(waiting)):
                count = min(desk.random.choice([1, 1, 7, 33, 128, 512]), budget + 1, life.num_left)
                budget -= count - 1
                chosen.append((life, count))
            fed = desk.feed([life.item(at, count) for at, (life, count) in enumerate(chosen)])
            for (life, _), digests in zip(chosen, fed, strict=True):
                life.take(digests)
    for life, one in zip(lives, batch, strict=True):
        pairs.judge(f"batch_{len(batch)}", life.digests, one.digests)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many compute while the block runs."""
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
    """Seeded answers with their log-probabilities: alone, and in mixes of batches, chunks, hits and threads."""
    random = proof.random
    runner, sizes = _runner(), BATCHES if proof.is_full else (2, 7)
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
        mixed += mixed_ways(runner, random, group)
    wrong = sum((one.tokens, one.logprobs) != (other.tokens, other.logprobs) for one, other in mixed)
    proof.report("sampled_pairs", len(mixed))
    proof.equals("sampled_mismatches", wrong, 0)


def mixed_ways(runner: Runner, random: Random, group: list[Ask]) -> list[tuple[Ask, Ask]]:
    """A group of requests together, in three ways: in small chunks, with hits and preemptions, on one thread."""

    def copies() -> list[Ask]:
        return [Ask(ask.prompt, ask.params, ask.seed, ask.n) for ask in group]

    def machine(**settings: int) -> Machine:
        return Machine(runner, max_running=len(group), **settings)

    chunked, shaken, single = copies(), copies(), copies()
    machine(max_step_tokens=len(group) + BLOCK + random.randint(0, 100)).run(random.sample(chunked, len(chunked)))
    warm = machine()
    heads = [
        Ask(ask.prompt[: random.randint(1, len(ask.prompt))], ResolvedSampling(max_tokens=1)) for ask in group[::2]
    ]
    warm.run(heads)

    def shake() -> None:
        if random.random() < 0.3:
            warm.engine.scheduler.preempt_latest()

    warm.run(random.sample(shaken, len(shaken)), shake)
    with threads(1):
        machine().run(random.sample(single, len(single)))
    return [pair for found in (chunked, shaken, single) for pair in zip(group, found, strict=True)]


@section("one completion")
def one_completion(proof: Proof) -> None:
    """One greedy request many times, scattered among others in engines of all widths."""
    random = proof.random
    runner, params = _runner(), ResolvedSampling(temperature=0.0, max_tokens=24)
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
