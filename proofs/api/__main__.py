"""`make proof-doors`: the HTTP server over real sockets, with real workers. Its model is an oracle, which computes
nothing, or the test model where the text matters. Needs the dev extra, and node and npm for the JavaScript SDK.
"""

import asyncio
import json
import shutil
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop

import quire
from benchmarks.test_model import smollm2_directory
from proofs.api import cached, draining, leaving, sdk, strangers
from proofs.api.load import (
    LOOPBACK,
    OUTBOUND,
    WORDS,
    Connections,
    Server,
    listeners,
    parse_stream,
    percentile,
    phrase,
    serve_words,
    started,
    stream_bytes,
)
from proofs.framework.proof import Proof, run, section
from quire.api.access.keys import add_key
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.opening import open_model
from quire.client.request.params import SamplingParams

PARTS = (sdk, cached, leaving, strangers, draining)
"""Modules whose sections run first. The section of listeners is the last: it checks what all servers before it did."""


@dataclass(frozen=True, slots=True)
class Load:
    """The length of requests, and the time for which they are counted."""

    seconds: float
    lead_s: float
    """A warm-up, before any request is counted."""
    max_tokens: tuple[int, int]
    dice: Random

    def body(self) -> dict[str, Any]:
        """A random request."""
        limit = self.dice.randint(*self.max_tokens)
        prompt = phrase(self.dice, 30)
        return {"model": "m", "prompt": prompt, "max_tokens": limit, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class FloodResult:
    """The figures of a flood."""

    capacity_rps: float
    offered: float
    """Offered requests over capacity; `goodput` is completed requests over capacity."""
    goodput: float
    num_rejected: int
    num_without_retry: int
    reject_p99_ms: float
    memory_growth: float
    drift: float
    """Capacity after the flood over capacity before it, minus 1."""


@section("overload")
def overload(proof: Proof) -> None:
    """Offer ten times the capacity, with answers of 16 to 64 tokens and with answers of 8 (`short_`).

    Ten times the capacity of short answers is so many requests that sending and rejecting them takes much of the
    machine's two cores. The bounds are equal.
    """
    seconds, lead_s = proof.sized(quick=8, full=60), proof.sized(quick=6, full=20)
    result = _run_flood(proof.folder, Load(seconds, lead_s, (16, 64), proof.random))
    proof.report("overload_capacity_rps", result.capacity_rps)
    proof.report("overload_capacity_drift", result.drift, "after the flood over before it, minus 1")
    proof.at_least("overload_offered_ratio", result.offered, proof.sized(quick=0.0, full=9.5), "of capacity")
    proof.at_least("overload_rejected", result.num_rejected, 1)
    proof.equals("missing_retry_after", result.num_without_retry, 0)
    proof.at_most("reject_p99_ms", result.reject_p99_ms, 50)
    proof.at_least("goodput", result.goodput, 0.95)
    proof.at_most("memory_growth", result.memory_growth, 0.05, "parent and worker")
    short = _run_flood(proof.folder, Load(seconds / 2, lead_s / 2, (8, 8), proof.random))
    proof.report("short_capacity_rps", short.capacity_rps)
    proof.report("short_capacity_drift", short.drift)
    proof.report("short_offered_ratio", short.offered)
    proof.equals("short_missing_retry_after", short.num_without_retry, 0)
    proof.at_most("short_reject_p99_ms", short.reject_p99_ms, 50)
    proof.at_least("short_goodput", short.goodput, 0.95)


def _run_flood(folder: Path, load: Load) -> FloodResult:
    arguments = serve_words("--queue", "64", "--max-open-requests", "128")
    with started(folder, *arguments, module="quire serve") as server:
        uvloop.run(_write_every_block(server, load.dice))
        first_rps = uvloop.run(_closed_loop(server, 64, load))
        before = server.resident_bytes()
        # A little more than ten times the measured rate, so that it is ten times the final capacity.
        flood = Flood(server, 10.5 * first_rps, load)
        uvloop.run(flood.run())
        growth = server.resident_bytes() / before - 1
        # A shared machine drifts: its capacity is the mean of the rates before and after.
        last_rps = uvloop.run(_closed_loop(server, 64, load))
        server.stop()
    capacity = (first_rps + last_rps) / 2
    return FloodResult(
        capacity,
        flood.num_offered / load.seconds / capacity,
        flood.num_done / load.seconds / capacity,
        len(flood.rejected),
        sum(not has_retry for _, has_retry in flood.rejected),
        percentile([ms for ms, _ in flood.rejected], 0.99) if flood.rejected else 0.0,
        growth,
        last_rps / first_rps - 1,
    )


async def _write_every_block(server: Server, dice: Random) -> None:
    """Write each block once. The kernel allocates the pool's pages at their first write, which is no memory growth."""
    engine = server.admin("/stats")["models"][0]["engine"]
    num_prompts = engine["num_blocks"] * engine["block_size"] // 1000 + 1
    with closing(Connections(server.port)) as connections:
        for _ in range(num_prompts):
            prompt = dice.choices(range(1000, 40_000), k=1000)
            answer = await connections.ask({"model": "m", "prompt": prompt, "max_tokens": 1})
            assert answer.status == 200, answer


async def _closed_loop(server: Server, num_clients: int, load: Load) -> float:
    """Requests per second with clients that each wait for their answer, counted after the warm-up."""
    window_s = load.seconds / 2
    num_done, begin_s = 0, time.perf_counter() + load.lead_s
    end_s = begin_s + window_s

    async def client(connections: Connections) -> None:
        nonlocal num_done
        while time.perf_counter() < end_s:
            answer = await connections.ask(load.body())
            num_done += answer.status == 200 and begin_s <= time.perf_counter() < end_s

    with closing(Connections(server.port)) as connections:
        await asyncio.gather(*(client(connections) for _ in range(num_clients)))
    return num_done / window_s


class Flood:
    """Sends requests at a fixed mean rate, without waiting for answers."""

    def __init__(self, server: Server, rate: float, load: Load) -> None:
        self._server = server
        self._rate = rate
        self._load = load
        self._begin_s = time.perf_counter() + load.lead_s
        self._end_s = self._begin_s + load.seconds
        self.num_offered = self.num_done = 0
        """Requests that were sent, and that were completed, within the window."""
        self.rejected: list[tuple[float, bool]] = []
        """Of each rejection: milliseconds until it came, and whether it had `retry-after`."""

    async def run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        with closing(Connections(self._server.port)) as connections:
            next_s = time.perf_counter()
            # Send times follow the clock, not the sleeps: a busy loop delays requests but drops none.
            while next_s < self._end_s:
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
                tasks.add(asyncio.ensure_future(self._send(connections)))
                next_s += self._load.dice.expovariate(self._rate)
            for task in tasks:
                await task

    def _is_counted(self, at_s: float) -> bool:
        return self._begin_s <= at_s < self._end_s

    async def _send(self, connections: Connections) -> None:
        start_s = time.perf_counter()
        self.num_offered += self._is_counted(start_s)
        body = self._load.body()
        answer = await connections.ask(body)
        end_s = time.perf_counter()
        if answer.status in (429, 503):
            self.rejected.append(((end_s - start_s) * 1000, answer.has_retry))
        elif answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == body["max_tokens"]:
            self.num_done += self._is_counted(end_s)
        else:
            raise RuntimeError(f"{answer.status} under load: {answer.body!r}")


@section("http overhead")
def http_overhead(proof: Proof) -> None:
    """Alternate 16 streams through HTTP and 16 in process on the same machine.

    The client shares the machine's two cores with the server: it only collects bytes, and parses them later.
    """
    rounds, num_tokens = proof.sized(quick=2, full=7), proof.sized(quick=32, full=128)
    settings = quire.ModelSettings(memory_bytes=2 << 30, max_sequence_tokens=1024)
    with started(proof.folder, *serve_words(), module="quire serve") as server:
        ratios, num_wrong = asyncio.run(_overhead_rounds(server, settings, rounds, num_tokens))
    proof.equals("http_overhead_wrong", num_wrong, 0, "answers of another length")
    proof.at_least("http_overhead", statistics.median(ratios), 0.90)


async def _overhead_rounds(
    server: Server, settings: quire.ModelSettings, rounds: int, num_tokens: int
) -> tuple[list[float], int]:
    """The ratios of the rounds, and the number of answers with a wrong length."""
    prompts = [f"The story number {index} of the {word} begins" for index, word in enumerate((WORDS * 2)[:16])]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    common_fields = {"model": "m", "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    bodies = [{**common_fields, "prompt": prompt} for prompt in prompts]
    ratios, num_wrong = [], 0
    async with AsyncEngine(open_model(str(smollm2_directory()), settings)) as engine:

        async def stream(prompt: str) -> int:
            num_tokens_streamed = 0
            async for piece in engine.stream(prompt, params):
                num_tokens_streamed += len(piece.token_ids)
            return num_tokens_streamed

        for index in range(rounds + 1):
            start_s = time.perf_counter()
            counts = await asyncio.gather(*(stream(prompt) for prompt in prompts))
            middle_s = time.perf_counter()
            streams = await asyncio.to_thread(stream_bytes, server.port, bodies)
            end_s = time.perf_counter()
            num_wrong += sum(count != num_tokens for count in counts)
            num_wrong += sum(not parse_stream(one).is_whole(num_tokens) for one in streams)
            if index:  # the first round warms both
                ratios.append((middle_s - start_s) / (end_s - middle_s))
    return ratios, num_wrong


@section("listeners")
def listening(proof: Proof) -> None:
    """The server and its worker listen on loopback only; with `--host`, on that address only."""
    folder, binds_before = proof.folder, OUTBOUND.recorded_events("socket.bind")
    with started(folder) as server:
        default_listeners = _beyond_loopback(server)
    default_listeners += [address for address in OUTBOUND.recorded_events("socket.bind") if address not in binds_before]
    keys = folder / "listeners.json"
    add_key(keys, "somebody")
    # In a network namespace of its own, so that no other machine can connect meanwhile.
    isolation = ("unshare", "--map-root-user", "--net") if shutil.which("unshare") else ()
    with started(folder, "--host", "0.0.0.0", "--keys-file", str(keys), before=isolation) as server:  # noqa: S104
        host_listeners = _beyond_loopback(server)
    binds = OUTBOUND.recorded_events("socket.bind")
    num_binds = len(binds) - len(binds_before)
    proof.equals("listeners_default", len(default_listeners), 0, "beyond loopback")
    proof.equals("listeners", len(host_listeners), 1, "when asked for")
    proof.equals("listeners_told", num_binds, 1, "by the process's own audit hook")
    remote_connections = OUTBOUND.remote_connections()
    proof.at_least("outbound_watched", OUTBOUND.num_processes, OUTBOUND.num_expected)
    proof.report("outbound_looks", OUTBOUND.num_polls)
    proof.holds("outbound_control", OUTBOUND.detects_connections(), "a connection would be recorded")
    proof.none("outbound", remote_connections, "connections to elsewhere")


def _beyond_loopback(server: Server) -> list[str]:
    return [address for pid in server.pids() for address in listeners(pid) if not LOOPBACK.match(address)]


PATHS = ("src/quire/api", "src/quire/client")

if __name__ == "__main__":
    sys.exit(run("doors", *PARTS, sys.modules[__name__], paths=PATHS))
