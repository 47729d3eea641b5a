"""`make proof-native`: bit for bit the same in any circumstance, and how near a step comes to the machine's roof.

    bare    the products of a step alone, by the fastest packed operator at exactly these rows (two for one)
    roof    bare + KV bytes / bandwidth, the best native sum over 1 GiB
    step    plan, run, sample and apply of the real engine

Times are taken turn about in one process, because the machine drifts; each figure is a ratio of medians.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random, SystemRandom

import torch

from benchmarks.proof import Proof, run, say
from benchmarks.proof_torch import real_text
from benchmarks.test_model import smollm2
from quire.backends.protocol import Runner
from quire.backends.torch import native
from quire.backends.torch.inputs import BatchMaker
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import LinearKind
from quire.backends.torch.load import load_model
from quire.backends.torch.models.model import Model
from quire.backends.torch.models.shape import DecoderShape, read_shape
from quire.config import ModelSettings
from quire.core.request import SamplingParams
from quire.core.step import WorkItem
from tests.support.models import Ask, Machine, load_runner, random_params, texts_of

BLOCK = 32
GIB = 1 << 30
SETTINGS = ModelSettings(memory_bytes=12 * GIB, max_step_tokens=512, max_sequence_tokens=4096)
DECODES = ((1, 288), (4, 288), (16, 288), (32, 288), (16, 1024), (64, 1024))


def prove(proof: Proof) -> None:
    random = Random(SystemRandom().getrandbits(64))
    with proof.section("the same bits in any circumstance"):
        bit_exact(proof, random)
    with proof.section("sampled tokens, and one completion"):
        sampled(proof, random)
        one_completion(proof, random)
    with proof.section("near the roof"):
        roofs(proof)
    with proof.section("prefill, sharing, bf16, fallback"):
        prefills(proof)
        shared_prefix(proof)
        batching(proof, random)
        kv_bf16(proof)


# -- bits --------------------------------------------------------------------------------------------------------------


class Desk:
    """A model and a store, fed by hand; every row's logits become a digest."""

    def __init__(self) -> None:
        self.model: Model = load_model(smollm2(), SETTINGS, 12 * GIB, lambda _done, _total: None)[0]
        self.store = KVStore(self.model.kv_shapes, 9_000, BLOCK, torch.float32, torch.device("cpu"))
        self._maker = BatchMaker(BLOCK, self.model.padded, torch.device("cpu"))

    @torch.inference_mode()
    def feed(self, items: Sequence[WorkItem]) -> list[list[bytes]]:
        """Digests of the logits of every fed row, item by item."""
        batch = self._maker.make(items)
        num_rows = sum(len(item.token_ids) for item in items)
        logits = self.model.compute(batch, self.store, torch.arange(num_rows)).logits.numpy()
        digests = [blake2b(row.tobytes(), digest_size=16).digest() for row in logits]
        ends = [first + len(item.token_ids) for first, item in zip(batch.first_rows, items, strict=True)]
        return [digests[first:end] for first, end in zip(batch.first_rows, ends, strict=True)]


@dataclass
class Life:
    """One sequence, its blocks, how far it is, and the digests of its rows so far."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    digests: list[bytes] = field(default_factory=list)

    def item(self, number: int, count: int) -> WorkItem:
        end = min(self.done + count, len(self.tokens))
        return WorkItem(number, tuple(self.tokens[self.done : end]), self.done, tuple(self.blocks), None, (), 0)

    def take(self, digests: list[bytes]) -> None:
        self.digests += digests
        self.done += len(digests)


class Blocks:
    """Hands out blocks in no order."""

    def __init__(self, random: Random) -> None:
        self._ids = random.sample(range(1, 9_001), 9_000)

    def take(self, num_tokens: int) -> list[int]:
        return [self._ids.pop() for _ in range(-(-num_tokens // BLOCK))]


def _alone(desk: Desk, tokens: list[int], blocks: Blocks, size: int = 512) -> Life:
    life = Life(tokens, blocks.take(len(tokens)))
    while life.done < len(tokens):
        life.take(desk.feed([life.item(0, size)])[0])
    return life


def _together(desk: Desk, lives: list[Life], random: Random) -> None:
    """Every step some feed one token and some a chunk, until all are done."""
    while waiting := [life for life in lives if life.done < len(life.tokens)]:
        budget, chosen = 512, []
        for life in random.sample(waiting, len(waiting)):
            count = min(random.choice([1, 1, 7, 33, 128, 512]), budget, len(life.tokens) - life.done)
            if count:
                chosen.append((life, count))
                budget -= count
        fed = desk.feed([life.item(at, count) for at, (life, count) in enumerate(chosen)])
        for (life, _), digests in zip(chosen, fed, strict=True):
            life.take(digests)


def bit_exact(proof: Proof, random: Random) -> None:
    desk, pairs, wrong = Desk(), 0, 0
    longest = 4_000 if proof.is_full else 160
    rounds = proof.sized(quick=1, full=13)

    def text() -> list[int]:
        return texts_of(random, real_text(), [round(math.exp(random.uniform(math.log(2), math.log(longest))))])[0]

    def judge(kind: str, equal: bool) -> None:
        nonlocal pairs, wrong
        pairs, wrong = pairs + 1, wrong + (not equal)
        if not equal:
            say(f"  not the same bits: {kind}")

    for _ in range(rounds):
        for size in (2, 7, 16, 33, 64) if proof.is_full else (2, 7, 16):
            blocks, texts = Blocks(random), [text() for _ in range(size)]
            alone = [_alone(desk, tokens, blocks).digests for tokens in texts]
            lives = [Life(tokens, blocks.take(len(tokens))) for tokens in texts]
            _together(desk, lives, random)
            for one, life in zip(alone, lives, strict=True):
                judge(f"in a batch of {size}", one == life.digests)
        for _ in range(12 if proof.is_full else 3):
            tokens, blocks = text(), Blocks(random)
            whole = _alone(desk, tokens, blocks)
            for size in (32, 64, 96):
                judge(f"chunks of {size}", _alone(desk, tokens, blocks, size).digests == whole.digests)
            if len(tokens) <= 256:
                judge("token by token", _alone(desk, tokens, blocks, 1).digests == whole.digests)
            judge("prefix hit", _hit(desk, whole, blocks, random))
            judge("resumed", _resumed(desk, whole, blocks, random))
            judge("one thread", _one_thread(desk, whole, blocks))
    proof.report("bitexact_pairs", pairs, "at least 2,000", holds=not proof.is_full or pairs >= 2_000)
    proof.report("bitexact_mismatches", wrong, "0", holds=wrong == 0)


def _hit(desk: Desk, whole: Life, blocks: Blocks, random: Random) -> bool:
    shared = random.randint(0, (len(whole.tokens) - 1) // BLOCK)
    table = [*whole.blocks[:shared], *blocks.take(len(whole.tokens) - shared * BLOCK)]
    life = Life(whole.tokens, table, shared * BLOCK)
    while life.done < len(life.tokens):
        life.take(desk.feed([life.item(0, 512)])[0])
    return life.digests == whole.digests[shared * BLOCK :]


def _resumed(desk: Desk, whole: Life, blocks: Blocks, random: Random) -> bool:
    """Stopped somewhere; some of its blocks survive, the rest is computed again elsewhere."""
    first = Life(whole.tokens, blocks.take(len(whole.tokens)))
    stop = random.randint(1, len(whole.tokens))
    while first.done < stop:
        first.take(desk.feed([first.item(0, min(512, stop - first.done))])[0])
    kept = random.randint(0, stop // BLOCK) if stop < len(whole.tokens) else random.randint(0, (stop - 1) // BLOCK)
    again = Life(whole.tokens, [*first.blocks[:kept], *blocks.take(len(whole.tokens) - kept * BLOCK)], kept * BLOCK)
    while again.done < len(again.tokens):
        again.take(desk.feed([again.item(0, 512)])[0])
    return first.digests == whole.digests[:stop] and again.digests == whole.digests[kept * BLOCK :]


def _one_thread(desk: Desk, whole: Life, blocks: Blocks) -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _alone(desk, whole.tokens, blocks).digests == whole.digests
    finally:
        torch.set_num_threads(before)


def _runner(**settings: object) -> Runner:
    defaults = {"memory_bytes": 12 * GIB, "max_sequence_tokens": 2_048, "max_step_tokens": 512}
    return load_runner(smollm2().directory, **{**defaults, **settings})


def sampled(proof: Proof, random: Random) -> None:
    runner, wrong = _runner(), 0
    count = proof.sized(quick=12, full=200)
    prompts = texts_of(random, real_text(), [random.randint(1, 300) for _ in range(count)])
    asks = [Ask(one, random_params(random, 16), random.getrandbits(63)) for one in prompts]
    alone = [Machine(runner).alone(ask).tokens for ask in asks]
    mixed = [Ask(ask.prompt, ask.params, ask.seed) for ask in asks]
    Machine(runner, max_running=32, queue=_large_queue()).run(random.sample(mixed, len(mixed)))
    wrong = sum(one != other.tokens for one, other in zip(alone, mixed, strict=True))
    proof.report("sampled_mismatches", wrong, "0", holds=wrong == 0)


def _large_queue() -> object:
    from quire.core.waiting_queue import QueueConfig  # noqa: PLC0415

    return QueueConfig(max_requests=4_096)


def one_completion(proof: Proof, random: Random) -> None:
    runner = _runner()
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompt = texts_of(random, real_text(), [90])[0]
    copies = [Ask(prompt, params) for _ in range(proof.sized(quick=40, full=1_000))]
    others = [Ask(one, params) for one in texts_of(random, real_text(), [random.randint(1, 200) for _ in copies[::3]])]
    mixed = random.sample([*copies, *others], len(copies) + len(others))
    while mixed:
        batch, mixed = mixed[:200], mixed[200:]
        Machine(runner, max_running=random.randint(3, 60), queue=_large_queue()).run(batch)
    distinct = len({tuple(copy.tokens) for copy in copies})
    proof.report("one_completion", distinct, "1", holds=distinct == 1)


# -- speed -------------------------------------------------------------------------------------------------------------


class Bare:
    """The products of a step at exactly this many rows, and nothing else."""

    def __init__(self, num_rows: int, head_rows: int, kind: LinearKind) -> None:
        shape = read_shape(smollm2().config)
        hidden, wide = shape.hidden_size, shape.intermediate_size
        sizes = ((_qkv(shape), hidden), (hidden, shape.query_size), (2 * wide, hidden), (hidden, wide))
        self._layers = [[kind.prepare(torch.randn(*size)) for size in sizes] for _ in range(shape.num_layers)]
        self._inputs = [torch.randn(num_rows, size) for size in (hidden, shape.query_size, hidden, wide)]
        head = LinearKind("mkl", "", (head_rows,)) if kind.name == "mkl" else kind
        self._head = head.prepare(torch.randn(shape.vocabulary_size, hidden))
        self._head_input = torch.randn(head_rows, hidden)

    @torch.inference_mode()
    def run(self) -> None:
        for layer in self._layers:
            for product, rows in zip(layer, self._inputs, strict=True):
                product(rows)
        self._head(self._head_input)


def _qkv(shape: DecoderShape) -> int:
    return shape.query_size + 2 * shape.kv_size


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _kv_bytes(num_rows: int, context: int) -> int:
    shape = read_shape(smollm2().config)
    return num_rows * context * 2 * shape.kv_size * shape.num_layers * 4


def _decoding(runner: Runner, num_rows: int, context: int, *, shared: int = 0) -> Machine:
    """An engine in which so many sequences of this length decode; `shared` tokens are the same for all."""
    machine = Machine(runner, max_running=64, max_step_tokens=512)
    prefix = real_text()[:shared]
    for at in range(num_rows):
        own = real_text()[1_000 * (at + 1) : 1_000 * (at + 1) + context - shared]
        machine.submit(Ask([*prefix, *own], SamplingParams(temperature=0.0, max_tokens=400)))
    sequences = machine.engine.scheduler.running
    while len(sequences) < num_rows or any(one.num_uncomputed > 1 for one in sequences):
        machine.step()
    return machine


def _medians(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each call in turn, round after round; medians in seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_timed(call))
    return {name: statistics.median(taken) for name, taken in times.items()}


def roofs(proof: Proof) -> None:
    runner = _runner()
    data = torch.ones(GIB // 4)
    rounds = proof.sized(quick=5, full=15)
    for num_rows, context in DECODES if proof.is_full else ((1, 288), (16, 288), (16, 1024)):
        machine = _decoding(runner, num_rows, context)
        exact = max(2, num_rows)
        bare = Bare(exact, exact, LinearKind("mkl", "", (exact,)))
        packed = Bare(exact, exact, LinearKind("onednn", ""))
        calls = {"bare": bare.run, "packed": packed.run, "read": lambda: native.read_sum(data), "step": machine.step}
        taken = _medians(calls, rounds)
        products = min(taken["bare"], taken["packed"])
        bandwidth = GIB / taken["read"]
        roof = products + _kv_bytes(num_rows, context) / bandwidth
        name = f"{num_rows}_{context}"
        told = f"step {taken['step'] * 1e3:.1f} ms, bare {products * 1e3:.1f} ms, {bandwidth / 1e9:.1f} GB/s"
        proof.report(f"roof_{name}", roof / taken["step"], f"at least 0.80; {told}", holds=roof / taken["step"] >= 0.8)
        if name == "16_288":
            share = products / taken["step"]
            proof.report("bare_16_288", share, "at least 0.68", holds=share >= 0.68)
        del bare, packed


def prefills(proof: Proof) -> None:
    """A whole step of 512 prompt tokens, with and without 512 tokens before it."""
    runner = _runner()
    bare = Bare(128, 2, LinearKind("mkl", "", (128,)))

    def products() -> None:
        for _ in range(4):
            bare.run()

    for past, bound in ((0, 0.80), (512, 0.62)):
        machine = Machine(runner, max_running=64, max_step_tokens=576)
        tokens, taken = real_text(), {"bare": [], "step": []}  # type: ignore[var-annotated]
        for at in range(proof.sized(quick=3, full=9)):
            prompt = tokens[3_000 * at : 3_000 * at + past + 512 + 32]
            machine.submit(Ask(prompt, SamplingParams(temperature=0.0, max_tokens=1)))
            for _ in range(past // 512):
                machine.step()
            taken["step"].append(_timed(machine.step))
            while machine.engine.has_work:
                machine.step()
            taken["bare"].append(_timed(products))
        share = statistics.median(taken["bare"]) / statistics.median(taken["step"])
        name = "prefill_512" if past == 0 else "prefill_512_past_512"
        proof.report(name, share, f"at least {bound}", holds=share >= bound)


def shared_prefix(proof: Proof) -> None:
    """32 sequences of 1,088 tokens: 1,024 of them in the same blocks, or in copies of their own."""
    runner = _runner()
    together = _decoding(runner, 32, 1_088, shared=1_024)
    rounds = proof.sized(quick=4, full=12)
    shared = statistics.median([_timed(together.step) for _ in range(rounds)])
    apart = _decoding(runner, 32, 1_088)
    private = statistics.median([_timed(apart.step) for _ in range(rounds)])
    proof.report("shared_prefix_speedup", private / shared, "at least 1.4", holds=private / shared >= 1.4)


def batching(proof: Proof, random: Random) -> None:
    runner = _runner()
    length = proof.sized(quick=32, full=128)
    prompts = texts_of(random, real_text(), [32] * 16)
    params = SamplingParams(temperature=0.0, max_tokens=length)
    together = _timed(lambda: Machine(runner).run([Ask(one, params) for one in prompts]))
    single = [_timed(lambda one=one: Machine(runner).alone(Ask(one, params))) for one in prompts[:4]]  # type: ignore[misc]
    speedup = statistics.median(single) * 16 / together
    proof.report("speedup_16_vs_1", speedup, "at least 6", holds=speedup >= 6)


def kv_bf16(proof: Proof) -> None:
    rounds = proof.sized(quick=4, full=12)
    full = _decoding(_runner(), 32, 1_024)
    half = _decoding(_runner(kv_dtype="bfloat16"), 32, 1_024)
    taken = _medians({"full": full.step, "half": half.step}, rounds)
    speedup = taken["full"] / taken["half"]
    proof.report("kv_bf16_speedup", speedup, "at least 1.25", holds=speedup >= 1.25)
    plain = _decoding(_runner(block_size=8), 16, 288)
    fast = _decoding(_runner(), 16, 288)
    taken = _medians({"plain": plain.step, "fast": fast.step}, rounds)
    proof.report("fallback_ratio", taken["plain"] / taken["fast"], "reported")


if __name__ == "__main__":
    sys.exit(run("native", prove))
