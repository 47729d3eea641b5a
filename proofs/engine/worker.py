"""`make proof-worker`: clients must not notice workers that are killed, hung, orphaned, or crashed by a request.

Processes and sockets are real. Sections about text use the test model, others the oracle, which computes nothing.
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
"""Limits for oracles, whose steps take milliseconds. Real models, whose steps may take longer, use the defaults."""
HANG_LIMITS = Limits(stuck_s=8.0)
"""Longer than the five seconds after which a worker without heartbeat is not ready, so that readiness drops first."""
NUM_STREAMS = 16
POISON_SEED = 666
QUESTIONS = ("Tell me about the {}.", "Write a sentence about a {}.", "What is a {}?", "Once upon a time a {}")
WORDS = ("river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "orange", "window", "lamp")


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """A request, and its completion or error."""

    prompt: str | list[int]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    completion: Completion | None = None
    error: str = ""

    @property
    def output(self) -> tuple[object, ...]:
        """All that a client receives, except times and the number of cached tokens, which a crash may change."""
        done = self.completion
        return () if done is None else (done.answers, done.prompt_logprobs, done.prompt_token_ids)

    @property
    def answer(self) -> Answer | None:
        return None if self.completion is None else self.completion.answers[0]


def random_request(random: Random, max_tokens: int, *, may_branch: bool = False) -> Ask:
    """Return a random request: greedy or seeded, some with log-probabilities or a stop string."""
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


async def run_request(engine_client: EngineClient, ask: Ask) -> None:
    """Stream the request, count its tokens, and store its completion or its error."""
    try:
        stream = engine_client.submit_ids(await engine_client.prompt_ids(ask.prompt), ask.params, **ask.options)
        try:
            async for piece in stream:
                ask.num_tokens += len(piece.token_ids)
        finally:
            stream.close()
        ask.completion = stream.completion()
        for each in ask.completion.answers:
            if each.finish_reason not in ("stop", "length"):
                ask.error = each.error_code or each.finish_reason
    except QuireError as error:
        ask.error = str(error)


async def run_requests(engine_client: EngineClient, asks: Sequence[Ask], concurrency: int = NUM_STREAMS) -> None:
    """Run all requests, at most `concurrency` at a time."""
    waiting = list(asks)

    async def client() -> None:
        while waiting:
            await run_request(engine_client, waiting.pop())

    await asyncio.gather(*(client() for _ in range(concurrency)))


def served_test_model(faults: Sequence[Fault] = (), limits: Limits | None = None) -> ServedModel:
    """Return the test model in a worker with these injected faults."""
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
    """Wait for the condition, and return the seconds that it took."""
    start_s = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
    return time.perf_counter() - start_s


async def cold_start_s(count: int) -> float:
    """Return the median time from spawning a worker until it is ready, which every restart takes again."""
    plan = plan_worker(str(smollm2_directory()), SETTINGS)().plan
    durations = []
    for _ in range(count):
        supervisor = Supervisor(plan, lambda _events: None, lambda _error: None)
        start_s = time.perf_counter()
        await supervisor.start()
        durations.append(time.perf_counter() - start_s)
        await supervisor.close()
    return statistics.median(durations)


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@dataclass
class Crowd:
    """Clients with one open stream each; when a stream ends, its client starts another."""

    model: ServedModel
    random: Random
    is_closing: bool = False
    asks: list[Ask] = field(default_factory=list)
    open: list[Ask] = field(default_factory=list)

    async def client(self) -> None:
        while not self.is_closing:
            ask = random_request(self.random, self.random.randint(24, 72), may_branch=True)
            self.asks.append(ask)
            self.open.append(ask)
            await run_request(self.model, ask)
            self.open.remove(ask)

    async def wait_for_a_token_each(self) -> None:
        counts = [(ask, ask.num_tokens) for ask in self.open]
        await until(lambda: all(ask.num_tokens > count or ask not in self.open for ask, count in counts))


@dataclass(frozen=True, slots=True)
class Kills:
    """Requests that ran while workers were killed, and `again`: the same requests without kills."""

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
        return sum(bool(ask.error) or ask.completion is None for ask in self.asks)

    @property
    def num_equal(self) -> int:
        pairs = zip(self.asks, self.again, strict=True)
        return sum(a.output == b.output and bool(a.output) for a, b in pairs)


async def run_with_kills(
    random: Random, num_kills: int, open_model: Callable[[], ServedModel] | None = None, num_streams: int = NUM_STREAMS
) -> Kills:
    """Kill the worker of a model (by default the test model) `num_kills` times during `num_streams` streams."""
    detections, pauses = [], []
    async with (open_model or served_test_model)() as model:
        crowd = Crowd(model, random)
        clients = [asyncio.create_task(crowd.client()) for _ in range(num_streams)]
        await until(lambda: len(crowd.open) == num_streams)
        for cycle in range(num_kills):
            await crowd.wait_for_a_token_each()
            await asyncio.sleep(random.uniform(0.0, 0.3))
            os.kill(model.supervisor.pid or 0, signal.SIGKILL)
            killed_s = time.perf_counter()
            detections.append(await until(lambda: not model.is_ready))
            await until(lambda: model.is_ready)
            pauses.append(time.perf_counter() - killed_s)
            if cycle % 10 == 9:
                say(f"  {cycle + 1} kills, {len(crowd.asks)} requests; the last cost {pauses[-1]:.1f} s")
        crowd.is_closing = True
        await asyncio.gather(*clients)
        num_restarts = model.supervisor.num_restarts
        again = [Ask(ask.prompt, ask.params, ask.options) for ask in crowd.asks]
        await run_requests(model, again)
    return Kills(tuple(crowd.asks), tuple(again), num_restarts, tuple(detections), tuple(pauses))


@section("kills")
async def kills(proof: Proof) -> None:
    result = await run_with_kills(proof.random, proof.sized(quick=2, full=100))
    proof.equals("kill_cycles", result.num_restarts, result.num_kills)
    proof.report("kill_requests", len(result.asks))
    proof.equals("lost", result.num_lost, 0)
    proof.equals("resumed_equal_share", result.num_equal / len(result.asks), 1.0)
    proof.at_most("detect_s", max(result.detections_s), 1)
    proof.report("kill_pause_s", statistics.median(result.pauses_s), "median, from a kill to ready again")


@section("recovery")
async def recovery(proof: Proof) -> None:
    """Cold starts and restarts under sixteen streams, interleaved, because the speed of the machine drifts."""
    cold_starts, restarts = [], []
    async with served_test_model() as model:
        for _ in range(proof.sized(quick=2, full=10)):
            async with asyncio.TaskGroup() as streams:
                streams.create_task(run_requests(model, [random_request(proof.random, 24) for _ in range(NUM_STREAMS)]))
                await until(lambda: model.num_open == NUM_STREAMS)
                os.kill(model.supervisor.pid or 0, signal.SIGKILL)
                killed_s = time.perf_counter()
                await until(lambda: not model.is_ready)
                await until(lambda: model.is_ready)
                restarts.append(time.perf_counter() - killed_s)
            cold_starts.append(await cold_start_s(1))
    load_s = statistics.median(cold_starts)
    extra_s = max(restarts) - load_s
    proof.report("load_s", load_s, "median cold start, from spawning to ready")
    proof.at_most("ready_extra_s", extra_s, 3, "the worst")
    proof.report("ready_extra_median_s", statistics.median(restarts) - load_s)


# -- poison ------------------------------------------------------------------------------------------------------------

ON_ONE_ROW = {"row"}
"""Kinds of faults that end only their own request, not the worker."""


def _poisons() -> list[tuple[str, Fault]]:
    """All faults by which a request ends its worker, injected while decoding; two also during prefill ("at once")."""
    decoding = [(kind, Fault(kind, seed=POISON_SEED, after=4)) for kind in sorted(KINDS - {"nan"})]
    return [*decoding, *((f"{kind} at once", Fault(kind, seed=POISON_SEED)) for kind in ("abort", "hang"))]


@section("poison")
async def poison(proof: Proof) -> None:
    quick_kinds = ("abort", "hang", "garbage", "row")
    kinds = [pair for pair in _poisons() if proof.is_full or pair[0] in quick_kinds]
    healthy = [SamplingParams(max_tokens=40, seed=seed, ignore_eos=True) for seed in range(15)]
    async with AsyncEngine(talker()) as engine:
        expected = [(await engine.generate(f"question {seed}", params)).answers for seed, params in enumerate(healthy)]
    num_survivors = num_ended = num_retries = 0
    for kind, fault in kinds:
        async with served(faults=encode_faults([fault]), limits=LIMITS) as model:
            poison_task = asyncio.create_task(model.generate("poison", replace(healthy[0], seed=POISON_SEED)))
            tasks = [model.generate(f"question {seed}", params) for seed, params in enumerate(healthy)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            end = (await poison_task).answers[0]
            pairs = zip(results, expected, strict=True)
            num_good = sum(isinstance(result, Completion) and result.answers == alone for result, alone in pairs)
            is_contained = end.finish_reason == "error" and (end.error_code == QUARANTINED) != (kind in ON_ONE_ROW)
            num_survivors, num_ended = num_survivors + num_good, num_ended + is_contained
            num_retries = max(num_retries, model.supervisor.ledger.num_quarantined)
            if num_good != len(healthy) or not is_contained:
                say(f"  {kind}: {num_good} of {len(healthy)} good; the poison: {end.finish_reason}, {end.error}")
    fatal = {fault.kind for _, fault in kinds} - ON_ONE_ROW
    proof.at_least("poison_kinds", len(fatal), proof.sized(quick=0, full=20))
    proof.equals("poison_survivors", num_survivors, len(kinds) * len(healthy), "all of them")
    proof.equals("poison_ended", num_ended, len(kinds), "all of them")
    proof.at_most("poison_lonely_retries", num_retries, 1)


async def last_beat_s(model: ServedModel) -> float:
    """Wait until the heartbeat has not advanced for a second, and return the time of its last advance."""
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
    not_ready_times, kill_times, recovery_times = [], [], []
    for _ in range(proof.sized(quick=1, full=5)):
        async with served_test_model([Fault("hang", seed=POISON_SEED, after=4)], HANG_LIMITS) as model:
            asks = [random_request(random, 32) for _ in range(7)]
            stuck_ask = Ask("Tell me a story.", SamplingParams(max_tokens=32, seed=POISON_SEED, ignore_eos=True))
            task = asyncio.create_task(run_requests(model, [*asks, stuck_ask]))
            pid = model.supervisor.pid or 0
            hang_start_s = await last_beat_s(model)
            await until(lambda: not model.is_ready)
            not_ready_times.append(time.monotonic() - hang_start_s)
            await until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
            killed_s = time.monotonic()
            kill_times.append(killed_s - hang_start_s)
            await until(lambda: model.is_ready)
            recovery_times.append(time.monotonic() - killed_s - load_s)
            await task
            if any(ask.error for ask in asks) or stuck_ask.error != QUARANTINED:
                raise RuntimeError(f"expected only the stuck request to fail, got errors {[ask.error for ask in asks]}")
    proof.at_most("hang_not_ready_s", max(not_ready_times), 5)
    proof.at_most("hang_killed_s", max(kill_times), HANG_LIMITS.stuck_s + 1, "the limit + 1")
    proof.at_most("hang_recovered_s", max(recovery_times), 3, "above load time")


@section("nan")
async def nan_rows(proof: Proof) -> None:
    share, count = 0.01, proof.sized(quick=24, full=240)
    asks = [random_request(proof.random, 24) for _ in range(count)]
    again = [Ask(ask.prompt, ask.params, ask.options) for ask in asks]
    async with served_test_model() as model:
        await run_requests(model, again)
        must_fail = [await _must_fail(model, ask, share) for ask in again]
    async with served_test_model([Fault("nan", share=share)]) as model:
        await run_requests(model, asks)
        num_restarts = model.supervisor.num_restarts
    num_wrong_ends = sum(bool(ask.error) != fails for ask, fails in zip(asks, must_fail, strict=True))
    num_changed = sum(
        a.output != b.output for a, b, fails in zip(asks, again, must_fail, strict=True) if not fails and not a.error
    )
    proof.at_least("nan_requests", sum(must_fail), 1, "otherwise nothing was tested")
    proof.equals("nan_rows", num_wrong_ends, 0, "exactly the requests with faulty rows fail")
    proof.equals("nan_restarts", num_restarts, 0)
    proof.equals("nan_others_changed", num_changed, 0)


async def _must_fail(model: EngineClient, ask: Ask, share: float) -> bool:
    """Whether a fault will hit one of its rows; only rows that write into a partly filled block are eligible."""
    assert ask.answer is not None
    assert ask.params.seed is not None
    first = len(await model.prompt_ids(ask.prompt))
    rows = range(first + 1, first + len(ask.answer.token_ids))
    return any(selects(ask.params.seed, row, share) for row in rows if (row - 1) % SETTINGS.block_size)


# -- orphaned processes ------------------------------------------------------------------------------------------------


@section("orphans")
def orphans(proof: Proof) -> None:
    count, num_left = proof.sized(quick=10, full=100), 0
    for index in range(count):
        end = list(ENDS)[index % len(ENDS)]
        with TemporaryDirectory() as folder:
            end_a_parent(end, Path(folder), proof.random)
            pids = left_of(Path(folder))
            if pids:
                say(f"  a parent that ended by {end} left these processes: {pids}")
            num_left += len(pids)
            for pid in workers_of(Path(folder)):
                os.kill(pid, signal.SIGKILL)
    proof.report("parent_ends", count)
    proof.equals("orphans", num_left, 0)


# -- garbage -----------------------------------------------------------------------------------------------------------


@section("garbage")
def garbage(proof: Proof) -> None:
    """Send mutated messages to both decoders; decoded messages of a worker are also applied to a ledger."""
    seeds = [encode_message(message) for message in (*TO_WORKER, *TO_PARENT)]
    count, num_valid, num_crashes, target = proof.sized(quick=20_000, full=1_000_000), 0, 0, LedgerTarget()
    for _ in range(count):
        data = _mutate(proof.random, seeds)
        for handle in (decode_to_worker, target.handle):
            try:
                handle(data)
                num_valid += 1
            except MessageError:
                pass
            except Exception as error:
                num_crashes += 1
                say(f"  {error!r} for {data!r}")
    proof.report("garbage_messages", count)
    proof.equals("garbage_crashes", num_crashes, 0)
    proof.report("garbage_believed", num_valid, "still valid messages after the mutation")


def _mutate(random: Random, seeds: Sequence[bytes]) -> bytes:
    dice = random.random()
    if dice < 0.2:
        return random.randbytes(random.randint(0, 120))
    data = bytearray(random.choice(seeds))
    if dice < 0.3:
        return bytes(data[: random.randrange(len(data))])
    if dice < 0.4:
        position = random.randrange(len(data))
        return bytes(data[:position] + random.randbytes(random.randint(1, 8)) + data[position:])
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


class LedgerTarget:
    """A ledger that handles messages as the supervisor does, always with one request at the worker."""

    def __init__(self) -> None:
        self._ledger = Ledger(49152)

    def handle(self, data: bytes) -> None:
        message = decode_to_parent(data)
        if not self._ledger.entries:
            self._ledger = Ledger(49152)  # so that the events match its first assignment
            self._ledger.add(msgspec.structs.replace(REQUEST, request_id="a"))
            self._ledger.due_commands(0.0)
        if isinstance(message, Stepped):
            self._ledger.take(message.events, [])


# -- speed and time ----------------------------------------------------------------------------------------------------


@section("overhead")
async def ipc_overhead(proof: Proof) -> None:
    """Compare sixteen streams in process with sixteen streams through a worker, interleaved."""
    size, rounds = proof.sized(quick=24, full=96), proof.sized(quick=2, full=7)
    random_params = [random_request(proof.random, size).params for _ in range(16)]
    params = [replace(each, ignore_eos=True, stop=(), logprobs=None) for each in random_params]

    async def tokens_per_s(engine_client: EngineClient) -> float:
        start_s = time.perf_counter()
        completions = await asyncio.gather(
            *(engine_client.generate(f"{WORDS[index % len(WORDS)]} {index}", one) for index, one in enumerate(params))
        )
        return sum(one.num_output_tokens for one in completions) / (time.perf_counter() - start_s)

    inner_rates, worker_rates = list[float](), list[float]()
    async with AsyncEngine(str(smollm2_directory()), SETTINGS) as inner_client, served_test_model() as worker_client:
        for engine_client in (inner_client, worker_client):
            await tokens_per_s(engine_client)
        for _ in range(rounds):
            inner_rates.append(await tokens_per_s(inner_client))
            worker_rates.append(await tokens_per_s(worker_client))
    ratio = statistics.median(worker_rates) / statistics.median(inner_rates)
    proof.report("ipc_tokens_per_s", statistics.median(worker_rates))
    spread_rate = max(worker_rates) - min(worker_rates)
    proof.report("ipc_spread", spread_rate / statistics.median(worker_rates), "of the rounds")
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
"""The number of requests of each kind in a thousand faulty ones. The seed of a request encodes its kind."""
SEED_BASE = 1 << 40


@dataclass
class Resources:
    """Resources of the parent process while no request runs."""

    memory_bytes: int
    num_handles: int
    num_tasks: int

    @classmethod
    def now(cls) -> "Resources":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()))


@section("soak")
async def soak(proof: Proof) -> None:
    random, count = proof.random, proof.sized(quick=1_000, full=100_000)
    faults = [Fault(kind, seed=SEED_BASE + number, after=1) for number, kind in enumerate(SOAK_FAULTS)]
    kinds = random.choices(range(len(SOAK_FAULTS)), list(SOAK_FAULTS.values()), k=count)
    num_lost = num_wrong = num_faulty = 0
    samples: list[tuple[int, int]] = []
    async with served(faults=encode_faults(faults), limits=LIMITS) as model:

        async def run_one(number: int) -> None:
            nonlocal num_lost, num_wrong, num_faulty
            is_faulty = number % 100 == 7
            num_faulty += is_faulty
            seed = SEED_BASE + kinds[number] if is_faulty else number
            params = SamplingParams(max_tokens=random.randint(2, 6), seed=seed, ignore_eos=True)
            # A tokenizer caches the first ten thousand texts. There are only a thousand different ones, all cached
            # before the first sample, so later growth comes from load.
            completion = await model.generate(f"{WORDS[number % len(WORDS)]} {number % 97}", params)
            has_failed = completion.finish_reason == FinishReason.ERROR.value
            num_lost += completion.finish_reason not in ("length", "error")
            num_wrong += has_failed != is_faulty

        await _run_all(run_one, range(count // 20))
        await until(lambda: model.is_ready and model.num_open == 0)
        before = Resources.now()
        for first in range(count // 20, count, max(1, count // 20)):
            await _run_all(run_one, range(first, min(count, first + count // 20)))
            samples.append((first, Resources.now().memory_bytes))
        await until(lambda: model.is_ready and model.num_open == 0)
        end, num_restarts, num_open = Resources.now(), model.supervisor.num_restarts, model.supervisor.num_open
    growth = end.memory_bytes / before.memory_bytes - 1
    proof.report("soak", count)
    proof.report("soak_faulty", num_faulty, "one in a hundred")
    num_fatal = sum(kinds[number] != 0 for number in range(7, count, 100))
    proof.report("soak_fatal", num_fatal, "faulty requests that end a worker; the others fail alone")
    proof.report("soak_restarts", num_restarts)
    proof.equals("soak_lost", num_lost + num_open, 0)
    proof.equals("soak_wrong_ends", num_wrong, 0, "exactly the faulty requests end with an error")
    proof.at_most("soak_memory_growth", growth, 0.05)
    proof.report("soak_bytes_per_request", _slope(samples))
    proof.at_most("soak_handles", end.num_handles - before.num_handles, 0)
    proof.at_most("soak_tasks", end.num_tasks - before.num_tasks, 0)


async def _run_all(run_one: Callable[[int], Awaitable[None]], numbers: Sequence[int], concurrency: int = 64) -> None:
    waiting = list(numbers)

    async def client() -> None:
        while waiting:
            await run_one(waiting.pop())

    await asyncio.gather(*(client() for _ in range(concurrency)))


def _slope(samples: Sequence[tuple[int, int]]) -> float:
    """Return the least-squares slope over the second half of the samples."""
    second_half = samples[len(samples) // 2 :]
    return float(statistics.linear_regression(*zip(*second_half, strict=True)).slope) if len(second_half) > 1 else 0.0


PATHS = ("src/quire/worker", "src/quire/engine", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("worker", paths=PATHS))
