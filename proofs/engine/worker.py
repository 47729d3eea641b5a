"""`make proof-worker`: workers that are killed, poisoned, hung and orphaned, and clients who cannot tell.

Real processes and sockets throughout. Where text matters the real model talks; where counts matter, the oracle.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, run, section
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.client import EngineClient
from quire.client.engines.served import ServedModel, Serving, plan_worker
from quire.client.reply.outputs import Answer, Completion
from quire.client.request.params import SamplingParams
from quire.config import ModelSettings
from quire.core.request import FinishReason
from quire.errors import MessageError, QuireError
from quire.worker.child.faults import Fault, selects
from quire.worker.messages import Stepped, decode_to_parent, decode_to_worker, encode_message
from quire.worker.parent.ledger import QUARANTINED, Ledger
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import Limits
from tests.support.servers.served import served
from tests.support.servers.talkers import talker
from tests.support.workers.broken_runner import KINDS
from tests.support.workers.messages import REQUEST, TO_PARENT, TO_WORKER
from tests.support.workers.parents import ENDS, end_a_parent, is_alive, left_of, workers_of

GIB = 1 << 30
SETTINGS = ModelSettings(memory_bytes=5 * GIB // 2, max_sequence_tokens=1024)
LIMITS = Limits(stuck_s=2.0)
"""For oracles, whose steps take milliseconds. A real model's may take longer on a busy machine: it has the default."""
HANG_LIMITS = Limits(stuck_s=8.0)
"""Longer than the five seconds after which a silent worker is not ready, so that the beat is what shows it."""
NUM_STREAMS = 16
POISON_SEED = 666
QUESTIONS = ("Tell me about the {}.", "Write a sentence about a {}.", "What is a {}?", "Once upon a time a {}")
WORDS = ("river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "orange", "window", "lamp")


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """A question, and what came back."""

    prompt: str | list[int]
    params: SamplingParams
    how: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    done: Completion | None = None
    error: str = ""

    @property
    def said(self) -> tuple[object, ...]:
        """Everything a client sees of it but the time it took, and how much was cached: a crash empties the cache."""
        done = self.done
        return () if done is None else (done.answers, done.prompt_logprobs, done.prompt_token_ids)

    @property
    def answer(self) -> Answer | None:
        return None if self.done is None else self.done.answers[0]


def question(random: Random, max_tokens: int, *, may_branch: bool = False) -> Ask:
    """Greedy or seeded, some with log-probabilities or a stop."""
    text = random.choice(QUESTIONS).format(random.choice(WORDS))
    greedy = random.random() < 0.5
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0,
        seed=random.getrandbits(60),
        logprobs=random.choice([None, None, 2]),
        prompt_logprobs=random.choice([None, None, None, 1]),
        stop=random.choice([(), (), ("\n\n",)]),
        ignore_eos=random.random() < 0.7,
        n=random.choice([1, 1, 1, 1, 3]) if may_branch else 1,
    )
    how = {"tenant": random.choice(["a", "b"]), "priority": random.choice(["high", "normal", "low"])}
    return Ask(text, params, how)


async def answer(engine_client: EngineClient, ask: Ask) -> None:
    """Stream it, count its tokens, keep what came; what goes wrong is kept too."""
    try:
        asked = engine_client.submit_ids(await engine_client.prompt_ids(ask.prompt), ask.params, **ask.how)
        try:
            async for piece in asked:
                ask.num_tokens += len(piece.token_ids)
        finally:
            asked.close()
        ask.done = asked.completion()
        for one in ask.done.answers:
            if one.finish_reason not in ("stop", "length"):
                ask.error = one.error_code or one.finish_reason
    except QuireError as error:
        ask.error = str(error)


async def answers_of(engine_client: EngineClient, asks: Sequence[Ask], concurrency: int = NUM_STREAMS) -> None:
    """All of them, so many at a time."""
    waiting = list(asks)

    async def client() -> None:
        while waiting:
            await answer(engine_client, waiting.pop())

    await asyncio.gather(*(client() for _ in range(concurrency)))


def real(faults: Sequence[Fault] = (), limits: Limits | None = None) -> ServedModel:
    """The test model in a worker; faults only where given."""
    prepare = plan_worker(str(smollm2_directory()), SETTINGS, limits=limits)

    def inject_faults() -> Serving:
        serving = prepare()
        return replace(serving, plan=replace(serving.plan, environment=_environment(faults)))

    return ServedModel(inject_faults)


def _environment(faults: Sequence[Fault]) -> dict[str, str]:
    return {"QUIRE_TESTING": "1", "QUIRE_FAULTS": encode_faults(faults)} if faults else {}


def encode_faults(faults: Sequence[Fault]) -> str:
    return json.dumps([{name: getattr(one, name) for name in one.__struct_fields__} for one in faults])


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    """Seconds it took."""
    started = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
    return time.perf_counter() - started


async def cold_start_s(count: int) -> float:
    """Median of how long a worker takes from its spawning to its being ready: what a restart must do again."""
    plan = plan_worker(str(smollm2_directory()), SETTINGS)().plan
    taken = []
    for _ in range(count):
        supervisor = Supervisor(plan, lambda _events: None, lambda _error: None)
        started = time.perf_counter()
        await supervisor.start()
        taken.append(time.perf_counter() - started)
        await supervisor.close()
    return statistics.median(taken)


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@dataclass
class Crowd:
    """So many streams at any time; who ends is followed by another."""

    model: ServedModel
    random: Random
    is_over: bool = False
    asks: list[Ask] = field(default_factory=list)
    open: list[Ask] = field(default_factory=list)

    async def client(self) -> None:
        while not self.is_over:
            ask = question(self.random, self.random.randint(24, 72), may_branch=True)
            self.asks.append(ask)
            self.open.append(ask)
            await answer(self.model, ask)
            self.open.remove(ask)

    async def each_has_a_token_more(self) -> None:
        seen = [(ask, ask.num_tokens) for ask in self.open]
        await until(lambda: all(ask.num_tokens > count or ask not in self.open for ask, count in seen))


@dataclass(frozen=True, slots=True)
class Kills:
    """What was asked while workers were killed, and the same asked again when none was."""

    asks: tuple[Ask, ...]
    again: tuple[Ask, ...]
    num_restarts: int
    detections_s: tuple[float, ...]
    pauses_s: tuple[float, ...]

    @property
    def num_kills(self) -> int:
        return len(self.pauses_s)

    @property
    def num_lost(self) -> int:
        return sum(bool(ask.error) or ask.done is None for ask in self.asks)

    @property
    def num_equal(self) -> int:
        pairs = zip(self.asks, self.again, strict=True)
        return sum(one.said == other.said and bool(one.said) for one, other in pairs)


async def killed_often(
    random: Random, num_kills: int, make: Callable[[], ServedModel] | None = None, num_streams: int = NUM_STREAMS
) -> Kills:
    """Kill the worker of a model so often under so many streams; of the real one, if nothing else is said."""
    detections, pauses = [], []
    async with (make or real)() as model:
        crowd = Crowd(model, random)
        clients = [asyncio.create_task(crowd.client()) for _ in range(num_streams)]
        await until(lambda: len(crowd.open) == num_streams)
        for cycle in range(num_kills):
            await crowd.each_has_a_token_more()
            await asyncio.sleep(random.uniform(0.0, 0.3))
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            killed_s = time.perf_counter()
            detections.append(await until(lambda: not model.is_ready))
            await until(lambda: model.is_ready)
            pauses.append(time.perf_counter() - killed_s)
            if cycle % 10 == 9:
                say(f"  {cycle + 1} kills, {len(crowd.asks)} requests; the last cost {pauses[-1]:.1f} s")
        crowd.is_over = True
        await asyncio.gather(*clients)
        num_restarts = model.supervisor.num_restarts
        again = [Ask(ask.prompt, ask.params, ask.how) for ask in crowd.asks]
        await answers_of(model, again)
    return Kills(tuple(crowd.asks), tuple(again), num_restarts, tuple(detections), tuple(pauses))


@section("kills")
async def kills(proof: Proof) -> None:
    told = await killed_often(proof.random, proof.sized(quick=2, full=100))
    proof.equals("kill_cycles", told.num_restarts, told.num_kills)
    proof.report("kill_requests", len(told.asks))
    proof.equals("lost", told.num_lost, 0)
    proof.equals("resumed_equal_share", told.num_equal / len(told.asks), 1.0)
    proof.at_most("detect_s", max(told.detections_s), 1)
    proof.report("kill_pause_s", statistics.median(told.pauses_s), "median, from a kill to ready again")


@section("recovery")
async def recovery(proof: Proof) -> None:
    """Cold starts and restarts under sixteen streams, interleaved, because the machine drifts."""
    cold, again = [], []
    async with real() as model:
        for _ in range(proof.sized(quick=2, full=10)):
            async with asyncio.TaskGroup() as streams:
                streams.create_task(answers_of(model, [question(proof.random, 24) for _ in range(NUM_STREAMS)]))
                await until(lambda: model.num_open == NUM_STREAMS)
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                killed_s = time.perf_counter()
                await until(lambda: not model.is_ready)
                await until(lambda: model.is_ready)
                again.append(time.perf_counter() - killed_s)
            cold.append(await cold_start_s(1))
    load_s = statistics.median(cold)
    extra_s = max(again) - load_s
    proof.report("load_s", load_s, "median cold start, from spawning to ready")
    proof.at_most("ready_extra_s", extra_s, 3, "the worst")
    proof.report("ready_extra_median_s", statistics.median(again) - load_s)


# -- poison ------------------------------------------------------------------------------------------------------------

ON_ONE_ROW = {"row"}
"""Kinds that end their own request and no worker."""


def _poisons() -> list[tuple[str, Fault]]:
    """Every kind that ends a worker, while it decodes, and two while the prompt is computed; and one bad row."""
    decoding = [(kind, Fault(kind, seed=POISON_SEED, after=4)) for kind in sorted(KINDS - {"nan"})]
    return [*decoding, *((f"{kind} at once", Fault(kind, seed=POISON_SEED)) for kind in ("abort", "hang"))]


@section("poison")
async def poison(proof: Proof) -> None:
    kinds = (
        _poisons() if proof.is_full else [one for one in _poisons() if one[0] in ("abort", "hang", "garbage", "row")]
    )
    plain = [SamplingParams(max_tokens=40, seed=at, ignore_eos=True) for at in range(15)]
    async with AsyncEngine(talker()) as engine:
        alone = [(await engine.generate(f"question {at}", params)).answers for at, params in enumerate(plain)]
    survivors, ended, num_retries = 0, 0, 0
    for kind, fault in kinds:
        async with served(faults=encode_faults([fault]), limits=LIMITS) as model:
            bad = asyncio.create_task(model.generate("poison", replace(plain[0], seed=POISON_SEED)))
            done = await asyncio.gather(
                *(model.generate(f"question {at}", params) for at, params in enumerate(plain)), return_exceptions=True
            )
            end = (await bad).answers[0]
            good = sum(isinstance(one, Completion) and one.answers == own for one, own in zip(done, alone, strict=True))
            is_own = end.finish_reason == "error" and (end.error_code == QUARANTINED) != (kind in ON_ONE_ROW)
            survivors, ended = survivors + good, ended + is_own
            num_retries = max(num_retries, model.supervisor.ledger.num_quarantined)
            if good != len(plain) or not is_own:
                say(f"  {kind}: {good} of {len(plain)} healthy, the poison ended by {end.finish_reason}: {end.error}")
    fatal = {fault.kind for _, fault in kinds} - ON_ONE_ROW
    proof.at_least("poison_kinds", len(fatal), proof.sized(quick=0, full=20))
    proof.equals("poison_survivors", survivors, len(kinds) * len(plain), "all of them")
    proof.equals("poison_ended", ended, len(kinds), "all of them")
    proof.at_most("poison_lonely_retries", num_retries, 1)


async def last_beat_s(model: ServedModel) -> float:
    """When the page's beat was last seen to move, once it has stood still for a second: the step began then."""
    num_heartbeats, moved_s = model.supervisor.worker_status().num_heartbeats, time.monotonic()
    while time.monotonic() - moved_s < 1.0:
        await asyncio.sleep(0.005)
        if model.supervisor.worker_status().num_heartbeats != num_heartbeats:
            num_heartbeats, moved_s = model.supervisor.worker_status().num_heartbeats, time.monotonic()
    return moved_s


@section("hang")
async def hang(proof: Proof) -> None:
    random = proof.random
    load_s = await cold_start_s(proof.sized(quick=1, full=5))
    not_ready, killed, recovered = [], [], []
    for _ in range(proof.sized(quick=1, full=5)):
        async with real([Fault("hang", seed=POISON_SEED, after=4)], HANG_LIMITS) as model:
            asks = [question(random, 32) for _ in range(7)]
            stuck = Ask("Tell me a story.", SamplingParams(max_tokens=32, seed=POISON_SEED, ignore_eos=True))
            asking = asyncio.create_task(answers_of(model, [*asks, stuck]))
            pid = model.supervisor.pid or 0
            began_s = await last_beat_s(model)
            await until(lambda: not model.is_ready)
            not_ready.append(time.monotonic() - began_s)
            await until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
            killed_s = time.monotonic()
            killed.append(killed_s - began_s)
            await until(lambda: model.is_ready)
            recovered.append(time.monotonic() - killed_s - load_s)
            await asking
            if any(ask.error for ask in asks) or stuck.error != QUARANTINED:
                raise RuntimeError(f"a neighbour of the stuck request ended badly: {[ask.error for ask in asks]}")
    proof.at_most("hang_not_ready_s", max(not_ready), 5)
    proof.at_most("hang_killed_s", max(killed), HANG_LIMITS.stuck_s + 1, "the limit + 1")
    proof.at_most("hang_recovered_s", max(recovered), 3, "above load time")


@section("nan")
async def nan_rows(proof: Proof) -> None:
    share, count = 0.01, proof.sized(quick=24, full=240)
    asks = [question(proof.random, 24) for _ in range(count)]
    again = [Ask(ask.prompt, ask.params, ask.how) for ask in asks]
    async with real() as model:
        await answers_of(model, again)
        doomed = [await _is_doomed(model, ask, share) for ask in again]
    async with real([Fault("nan", share=share)]) as model:
        await answers_of(model, asks)
        num_restarts = model.supervisor.num_restarts
    wrong_ends = sum(bool(ask.error) != is_doomed for ask, is_doomed in zip(asks, doomed, strict=True))
    changed = sum(
        one.said != other.said for one, other, bad in zip(asks, again, doomed, strict=True) if not bad and not one.error
    )
    proof.at_least("nan_requests", sum(doomed), 1, "else nothing was tried")
    proof.equals("nan_rows", wrong_ends, 0, "exactly those fail")
    proof.equals("nan_restarts", num_restarts, 0)
    proof.equals("nan_others_changed", changed, 0)


async def _is_doomed(model: EngineClient, ask: Ask, share: float) -> bool:
    """Whether one of its rows will be spoilt: a row that writes into a block which holds something already."""
    assert ask.answer is not None
    assert ask.params.seed is not None
    first = len(await model.prompt_ids(ask.prompt))
    rows = range(first + 1, first + len(ask.answer.token_ids))
    return any(selects(ask.params.seed, at, share) for at in rows if (at - 1) % SETTINGS.block_size)


# -- nothing left behind -----------------------------------------------------------------------------------------------


@section("orphans")
def orphans(proof: Proof) -> None:
    count, num_left = proof.sized(quick=10, full=100), 0
    for at in range(count):
        end = list(ENDS)[at % len(ENDS)]
        with TemporaryDirectory() as folder:
            end_a_parent(end, Path(folder), proof.random)
            left = left_of(Path(folder))
            if left:
                say(f"  a parent that ends by {end} leaves {left}")
            num_left += len(left)
            for pid in workers_of(Path(folder)):
                os.kill(pid, signal.SIGKILL)
    proof.report("parent_ends", count)
    proof.equals("orphans", num_left, 0)


# -- garbage -----------------------------------------------------------------------------------------------------------


@section("garbage")
def garbage(proof: Proof) -> None:
    """Bytes of all kinds to both decoders; what passes as a worker's message goes on to the books."""
    seeds = [encode_message(message) for message in (*TO_WORKER, *TO_PARENT)]
    count, believed, crashes, books = proof.sized(quick=20_000, full=1_000_000), 0, 0, Books()
    for _ in range(count):
        data = _mutated(proof.random, seeds)
        for hear in (decode_to_worker, books.hear):
            try:
                hear(data)
                believed += 1
            except MessageError:
                pass
            except Exception as error:
                crashes += 1
                say(f"  {error!r} for {data!r}")
    proof.report("garbage_messages", count)
    proof.equals("garbage_crashes", crashes, 0)
    proof.report("garbage_believed", believed, "still messages after the change")


def _mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    dice = random.random()
    if dice < 0.2:
        return random.randbytes(random.randint(0, 120))
    data = bytearray(random.choice(seeds))
    if dice < 0.3:
        return bytes(data[: random.randrange(len(data))])
    if dice < 0.4:
        at = random.randrange(len(data))
        return bytes(data[:at] + random.randbytes(random.randint(1, 8)) + data[at:])
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


class Books:
    """A ledger that hears as the supervisor does, always with a request at the worker."""

    def __init__(self) -> None:
        self._ledger = Ledger(49152)

    def hear(self, data: bytes) -> None:
        message = decode_to_parent(data)
        if not self._ledger.entries:
            self._ledger = Ledger(49152)  # its first assignment is the one the events are of
            self._ledger.add(msgspec.structs.replace(REQUEST, request_id="a"))
            self._ledger.due_commands(0.0)
        if isinstance(message, Stepped):
            self._ledger.take(message.events, [])


# -- speed and time ----------------------------------------------------------------------------------------------------


@section("overhead")
async def ipc_overhead(proof: Proof) -> None:
    """Sixteen streams in process and through a worker, interleaved."""
    length, rounds = proof.sized(quick=24, full=96), proof.sized(quick=2, full=7)
    asks = [replace(question(proof.random, length).params, ignore_eos=True, stop=(), logprobs=None) for _ in range(16)]

    async def tokens_per_s(engine_client: EngineClient) -> float:
        started = time.perf_counter()
        done = await asyncio.gather(
            *(engine_client.generate(f"{WORDS[at % len(WORDS)]} {at}", one) for at, one in enumerate(asks))
        )
        return sum(one.num_output_tokens for one in done) / (time.perf_counter() - started)

    within: list[float] = []
    through: list[float] = []
    async with AsyncEngine(str(smollm2_directory()), SETTINGS) as open_requests, real() as outside:
        for engine_client in (open_requests, outside):
            await tokens_per_s(engine_client)
        for _ in range(rounds):
            within.append(await tokens_per_s(open_requests))
            through.append(await tokens_per_s(outside))
    ratio = statistics.median(through) / statistics.median(within)
    proof.report("ipc_tokens_per_s", statistics.median(through))
    proof.report("ipc_spread", (max(through) - min(through)) / statistics.median(through), "of the rounds")
    proof.at_least("ipc_overhead", ratio, 0.95)


SOAK_FAULTS = {
    "row": 700,
    "raise": 50,
    "abort": 50,
    "exit": 50,
    "missing_row": 40,
    "garbage": 30,
    "out_of_memory": 40,
    "invariant": 30,
    "hang": 10,
}
"""Of a thousand requests that are faulty, so many of each kind. The kind is written in the seed."""
SEED_BASE = 1 << 40


@dataclass
class Held:
    """What the parent holds, at rest."""

    memory_bytes: int
    num_handles: int
    num_tasks: int

    @classmethod
    def now(cls) -> "Held":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()))


@section("soak")
async def soak(proof: Proof) -> None:
    random, count = proof.random, proof.sized(quick=1_000, full=100_000)
    faults = [Fault(kind, seed=SEED_BASE + at, after=1) for at, kind in enumerate(SOAK_FAULTS)]
    kinds = random.choices(range(len(SOAK_FAULTS)), list(SOAK_FAULTS.values()), k=count)
    lost = wrong = num_faulty = 0
    samples: list[tuple[int, int]] = []
    async with served(faults=encode_faults(faults), limits=LIMITS) as model:

        async def one(at: int) -> None:
            nonlocal lost, wrong, num_faulty
            is_faulty = at % 100 == 7
            num_faulty += is_faulty
            seed = SEED_BASE + kinds[at] if is_faulty else at
            params = SamplingParams(max_tokens=random.randint(2, 6), seed=seed, ignore_eos=True)
            # A tokenizer remembers the first ten thousand texts it meets: a thousand of them are all met before the
            # first look, so that what grows afterwards grows with load.
            done = await model.generate(f"{WORDS[at % len(WORDS)]} {at % 97}", params)
            is_ended = done.finish_reason == FinishReason.ERROR.value
            lost += done.finish_reason not in ("length", "error")
            wrong += is_ended != is_faulty

        await _crowd(one, range(count // 20))
        await until(lambda: model.is_ready and model.num_open == 0)
        before = Held.now()
        for first in range(count // 20, count, max(1, count // 20)):
            await _crowd(one, range(first, min(count, first + count // 20)))
            samples.append((first, Held.now().memory_bytes))
        await until(lambda: model.is_ready and model.num_open == 0)
        after, num_restarts, num_open = Held.now(), model.supervisor.num_restarts, model.supervisor.num_open
    growth = after.memory_bytes / before.memory_bytes - 1
    proof.report("soak", count)
    proof.report("soak_faulty", num_faulty, "one in a hundred")
    num_fatal = sum(kinds[at] != 0 for at in range(7, count, 100))
    proof.report("soak_fatal", num_fatal, "of those, what ends a worker; the others spoil a row")
    proof.report("soak_restarts", num_restarts)
    proof.equals("soak_lost", lost + num_open, 0)
    proof.equals("soak_wrong_ends", wrong, 0, "the faulty end in an error, and only they")
    proof.at_most("soak_memory_growth", growth, 0.05)
    proof.report("soak_bytes_per_request", _slope(samples))
    proof.at_most("soak_handles", after.num_handles - before.num_handles, 0)
    proof.at_most("soak_tasks", after.num_tasks - before.num_tasks, 0)


async def _crowd(one: Callable[[int], Awaitable[None]], numbers: Sequence[int], concurrency: int = 64) -> None:
    waiting = list(numbers)

    async def client() -> None:
        while waiting:
            await one(waiting.pop())

    await asyncio.gather(*(client() for _ in range(concurrency)))


def _slope(samples: Sequence[tuple[int, int]]) -> float:
    """Least squares over the second half."""
    late = samples[len(samples) // 2 :]
    return float(statistics.linear_regression(*zip(*late, strict=True)).slope) if len(late) > 1 else 0.0


PATHS = ("src/quire/worker", "src/quire/engine", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("worker", paths=PATHS))
