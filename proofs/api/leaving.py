"""Clients that disconnect, and clients that read slowly: resources they leave, effects on other clients."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import Server, Streamed, connect_slowly, disconnect_early, percentile, phrase, started, stream_text
from proofs.framework.proof import Proof, section
from tests.support.workers.recording import DIARY, passes_in


@section("disconnects")
def disconnects(proof: Proof) -> None:
    """Open many streams, of which three of ten disconnect. The worker's diary has the time when each was freed."""
    count, num_open = proof.sized(quick=800, full=20_000), proof.sized(quick=80, full=500)
    diary = proof.folder / "leaving.diary"
    options = ("--max-open-requests", "2000", "--queue", "2000", "--sequence-tokens", "2048", "--blocks", "8192")
    with started(proof.folder, *options, environment={DIARY: str(diary)}) as server:
        clients = Clients(server)
        asyncio.run(clients.run(40, 20, Random(1)))
        settle(server)
        base = (server.num_descriptors(), server.admin("/stats")["num_tasks"])
        clients = Clients(server, first_seed=10**6)
        asyncio.run(clients.run(count, num_open, proof.random))
        seconds = settle(server)
        stats, num_descriptors = server.admin("/stats"), server.num_descriptors()
        used_blocks = stats["models"][0]["engine"]["kv_usage"] * stats["models"][0]["engine"]["num_blocks"]
        num_leaked = round(used_blocks) + stats["num_open_requests"] + max(0, num_descriptors - base[0])
        num_leaked += max(0, stats["num_tasks"] - base[1])
        server.stop()
    freed_s, num_running = _freed_s(diary, clients.disconnect_s)
    proof.report("disconnect_requests", count)
    proof.at_least("disconnects", len(clients.disconnect_s), 0.25 * count)
    proof.at_least("disconnects_running", num_running, 1, "disconnected while they ran")
    proof.at_most("disconnect_freed_s", freed_s, 1.0, "until the slowest was freed")
    proof.none("disconnect_survivors_wrong", clients.problems)
    proof.at_most("disconnect_settled_s", seconds, 1.0)
    proof.equals("leaked", num_leaked, 0, "blocks, requests, tasks, descriptors")


def _freed_s(diary: Path, disconnect_s: dict[int, float]) -> tuple[float, int]:
    """The longest time from a disconnect until the blocks were free, and the number of disconnects while running.

    The diary of a step has the requests that the worker released since the step before.
    """
    max_s, num_running = 0.0, 0
    for run in passes_in(diary):
        if run.seed in disconnect_s:
            freed_s = (run.ended_s or run.last_s) - disconnect_s[run.seed]
            num_running += freed_s > 0
            max_s = max(max_s, freed_s, run.last_s - disconnect_s[run.seed])
            if run.ended_s is None:
                say(f"  the worker never released seed {run.seed}")
                max_s = 1e9
    return max_s, num_running


@dataclass
class Clients:
    """Concurrent clients, some of which disconnect early."""

    server: Server
    first_seed: int = 0
    disconnect_s: dict[int, float] = field(default_factory=dict)
    """Seed -> the monotonic time of its disconnect."""
    problems: list[str] = field(default_factory=list)
    """Messages about incomplete streams of clients that did not disconnect."""

    async def run(self, count: int, num_open: int, random: Random) -> None:
        gate = asyncio.Semaphore(num_open)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

            async def request(seed: int) -> None:
                async with gate:
                    await self._request(session, seed, random)

            await asyncio.gather(*(request(self.first_seed + index) for index in range(count)))
            # One more request, so that the worker makes a step and writes the last releases.
            await stream_text(session, self.server.url, {"model": "oracle", "prompt": "last", "max_tokens": 2})

    async def _request(self, session: aiohttp.ClientSession, seed: int, random: Random) -> None:
        num_tokens = random.randint(5, 120)
        body = {"model": "oracle", "prompt": phrase(random), "max_tokens": num_tokens, "ignore_eos": True, "seed": seed}
        if random.random() < 0.3:
            moment = random.choice(["half a body", "nothing", "headers", "some text"])
            # Longer than a second, the bound: its blocks are freed by the disconnect, not by its end.
            long_body = {**body, "max_tokens": 1900, "stream": True}
            self.disconnect_s[seed] = await disconnect_early(self.server.port, long_body, moment, random.random() < 0.5)
            return
        try:
            stream = await stream_text(session, self.server.url, body)
        except aiohttp.ClientError as error:
            self.problems.append(f"seed {seed}: {error!r}")
            return
        if not stream.is_whole(num_tokens):
            tokens = f"{stream.num_tokens} of {num_tokens} tokens"
            self.problems.append(f"seed {seed}: {stream.status}, {tokens}, {stream.errors} {stream.tail!r}")


def settle(server: Server) -> float:
    """Wait until no request is open and no block is used, 60 s at most; returns the seconds."""
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < 60:
        stats = server.admin("/stats")
        if not stats["num_open_requests"] and not stats["models"][0]["engine"]["kv_usage"]:
            time.sleep(0.3)  # descriptors of connections that were just closed
            return time.perf_counter() - start_s - 0.3
        time.sleep(0.02)
    return 60.0


# -- slow readers ------------------------------------------------------------------------------------------------------


@section("slow readers")
def slow_readers(proof: Proof) -> None:
    """Compare the token gaps of normal readers, with and without slow ones, over the same stretch of their streams."""
    num_slow, num_normal = proof.sized(quick=10, full=50), proof.sized(quick=30, full=150)
    num_tokens, stuck_s = proof.sized(quick=1_500, full=20_000), 2.0 if not proof.is_full else 30.0
    options = ("--running", "256", "--sequence-tokens", str(num_tokens + 200), "--send-buffer", "65536",
             "--blocks", str((num_slow + num_normal) * (num_tokens // 16 + 20)), "--stuck-s", str(stuck_s))  # fmt: skip
    with started(proof.folder, *options) as server:
        readers = Readers(server, num_tokens)
        slow_gaps, window_s = asyncio.run(readers.gaps_among_slow(num_normal, num_slow))
        quick_gaps = asyncio.run(readers.gaps_among_quick(num_normal, num_slow, window_s))
        baseline_ms = percentile(quick_gaps, 0.99) * 1000
        effect, num_gaps = percentile(slow_gaps, 0.99) * 1000 / baseline_ms, min(len(quick_gaps), len(slow_gaps))
        settle(server)
        server.stop()
        num_cut = len(_cuts(server))
    proof.report("slow_baseline_p99_ms", baseline_ms)
    proof.report("slow_window_s", window_s, "while all slow readers are connected")
    proof.holds("slow_window", window_s > 0, "there was one")
    proof.at_least("slow_gaps", num_gaps, 1000, "of each")
    proof.at_most("slow_reader_effect", effect, 1.2)
    proof.equals("slow_cut", num_cut, num_slow, "all of them")


def _cuts(server: Server) -> list[dict[str, Any]]:
    return [line for line in server.access_lines() if line.get("error") == "reader_too_slow"]


@dataclass
class Readers:
    """Concurrent readers of equal streams; `other` readers also ask for log-probabilities, to fill their buffers."""

    server: Server
    num_tokens: int

    def _body(self, name: str, i: int) -> dict[str, Any]:
        more = {"logprobs": 5} if name == "other" else {}
        return {"model": "oracle", "max_tokens": self.num_tokens, "ignore_eos": True, "prompt": f"{name} {i}", **more}

    async def gaps_among_slow(self, num_normal: int, num_slow: int) -> tuple[list[float], float]:
        """Token gaps of the normal readers until the first slow one was cut, and the length of that window."""
        num_before, stop, enough = len(_cuts(self.server)), asyncio.Event(), asyncio.Event()
        connections = [connect_slowly(self.server.port, self._body("other", index)) for index in range(num_slow)]
        reader_task = asyncio.ensure_future(_read_slowly(connections, stop))
        cut = asyncio.ensure_future(self._first_cut(num_before))
        streams_task = asyncio.ensure_future(self._read_until(enough, "reader", num_normal))
        start_s = time.perf_counter()
        cut_s = await cut
        deadline = time.perf_counter() + 60
        while time.perf_counter() < deadline and len(_cuts(self.server)) < num_before + num_slow:
            await asyncio.sleep(0.2)
        enough.set()
        streams = await streams_task
        stop.set()
        await reader_task
        return _gaps(streams, start_s, cut_s), cut_s - start_s

    async def gaps_among_quick(self, num_normal: int, num_more: int, window_s: float) -> list[float]:
        """Token gaps of the normal readers, beside others that read quickly."""
        enough = asyncio.Event()
        others = asyncio.ensure_future(self._read_until(enough, "other", num_more))
        streams = asyncio.ensure_future(self._read_until(enough, "reader", num_normal))
        start_s = time.perf_counter()
        await asyncio.sleep(window_s)
        enough.set()
        await others
        return _gaps(await streams, start_s, start_s + window_s)

    async def _read_until(self, enough: asyncio.Event, name: str, count: int) -> list[Streamed]:
        """Read streams until `enough` is set; what comes later is not counted."""
        streams = [Streamed() for _ in range(count)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session:
            url, bodies = self.server.url, [self._body(name, number) for number in range(count)]
            readers = asyncio.gather(*(stream_text(session, url, *pair) for pair in zip(bodies, streams, strict=True)))
            await enough.wait()
            readers.cancel()
            with suppress(asyncio.CancelledError):
                await readers
        for stream in streams:
            if stream.status != 200 or stream.errors:
                raise RuntimeError(f"a normal reader was cut: {stream.status} {stream.errors} {stream.tail!r}")
        return streams

    async def _first_cut(self, num_before: int) -> float:
        deadline = time.perf_counter() + 600
        while len(_cuts(self.server)) == num_before and time.perf_counter() < deadline:
            await asyncio.sleep(0.05)
        return time.perf_counter()


def _gaps(streams: list[Streamed], start_s: float, end_s: float) -> list[float]:
    """Times between tokens within the window."""
    return [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.moments)
        if start_s <= earlier and later <= end_s
    ]


async def _read_slowly(connections: list[Any], stop: asyncio.Event) -> None:
    """Read one byte per second from each connection."""
    for connection in connections:
        connection.setblocking(False)
    while not stop.is_set():
        for connection in connections:
            try:
                connection.recv(1)
            except (BlockingIOError, ConnectionError):
                continue
        try:
            await asyncio.wait_for(stop.wait(), 1.0)
        except TimeoutError:
            continue
    for connection in connections:
        connection.close()
