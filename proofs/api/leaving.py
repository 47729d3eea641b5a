"""Clients that leave, and clients that do not read: what is left of the first, and what the others notice of either."""

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
from proofs.api.load import Server, Streamed, leave, percentile, phrase, slow_wire, started, stream_text
from proofs.framework.proof import Proof, section
from tests.support.workers.recording import DIARY, passes_in


@section("disconnects")
def disconnects(proof: Proof) -> None:
    """Streams only, many at once; three of ten leave. The worker's diary says when it let go of each."""
    count, at_once = proof.sized(quick=800, full=20_000), proof.sized(quick=80, full=500)
    diary = proof.folder / "leaving.diary"
    words = ("--max-open-requests", "2000", "--queue", "2000", "--sequence-tokens", "2048", "--blocks", "8192")
    with started(proof.folder, *words, environment={DIARY: str(diary)}) as server:
        crowd = Crowd(server)
        asyncio.run(crowd.come_and_go(40, 20, Random(1)))
        settle(server)
        before = (server.num_descriptors(), server.admin("/stats")["num_tasks"])
        crowd = Crowd(server, first_seed=10**6)
        asyncio.run(crowd.come_and_go(count, at_once, proof.random))
        seconds = settle(server)
        stats, after = server.admin("/stats"), server.num_descriptors()
        held = stats["models"][0]["engine"]["kv_usage"] * stats["models"][0]["engine"]["num_blocks"]
        leaked = round(held) + stats["num_open_requests"] + max(0, after - before[0])
        leaked += max(0, stats["num_tasks"] - before[1])
        server.stop()
    freed_s, num_running = _freed_s(diary, crowd.left_s)
    proof.report("disconnect_requests", count)
    proof.at_least("disconnects", len(crowd.left_s), 0.25 * count)
    proof.at_least("disconnects_running", num_running, 1, "left while they ran")
    proof.at_most("disconnect_freed_s", freed_s, 1.0, "the last to be free")
    proof.none("disconnect_survivors_wrong", crowd.wrong)
    proof.at_most("disconnect_settled_s", seconds, 1.0)
    proof.equals("leaked", leaked, 0, "blocks, requests, tasks, descriptors")


def _freed_s(diary: Path, left_s: dict[int, float]) -> tuple[float, int]:
    """The longest from a leaving to the blocks' being free, and how many were running when they left.

    The worker's next step tells of those it let go of since the one before: they were free by then.
    """
    longest, num_running = 0.0, 0
    for one in passes_in(diary):
        if one.seed in left_s:
            until_s = (one.ended_s or one.last_s) - left_s[one.seed]
            num_running += until_s > 0
            longest = max(longest, until_s, one.last_s - left_s[one.seed])
            if one.ended_s is None:
                say(f"  nobody let go of seed {one.seed}")
                longest = 1e9
    return longest, num_running


@dataclass
class Crowd:
    """Clients of whom some leave."""

    server: Server
    first_seed: int = 0
    left_s: dict[int, float] = field(default_factory=dict)
    """When, by the machine's own clock, by seed."""
    wrong: list[str] = field(default_factory=list)
    """What those got who stayed, where it was not all they asked for."""

    async def come_and_go(self, count: int, at_once: int, dice: Random) -> None:
        gate = asyncio.Semaphore(at_once)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

            async def one(seed: int) -> None:
                async with gate:
                    await self._one(session, seed, dice)

            await asyncio.gather(*(one(self.first_seed + at) for at in range(count)))
            # One more, so that the worker makes a step and tells of the last who left.
            await stream_text(session, self.server.url, {"model": "oracle", "prompt": "last", "max_tokens": 2})

    async def _one(self, session: aiohttp.ClientSession, seed: int, dice: Random) -> None:
        num_tokens = dice.randint(5, 120)
        body = {"model": "oracle", "prompt": phrase(dice), "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"seed": seed}
        if dice.random() < 0.3:
            after = dice.choice(["half a body", "nothing", "headers", "some text"])
            # More than could be said in the second there is: it is free in time because it left, not because it ended.
            long = {**body, "max_tokens": 1900, "stream": True}
            self.left_s[seed] = await leave(self.server.port, long, after, dice.random() < 0.5)
            return
        try:
            told = await stream_text(session, self.server.url, body)
        except aiohttp.ClientError as error:
            self.wrong.append(f"seed {seed}: {error!r}")
            return
        if not told.is_whole(num_tokens):
            self.wrong.append(f"{num_tokens} wanted: {told.status} {told.num_tokens} {told.errors} {told.tail!r}")


def settle(server: Server) -> float:
    """Seconds until nobody is inside and nothing is held; 60 at most."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < 60:
        stats = server.admin("/stats")
        if not stats["num_open_requests"] and not stats["models"][0]["engine"]["kv_usage"]:
            time.sleep(0.3)  # descriptors of connections that were just closed
            return time.perf_counter() - begun - 0.3
        time.sleep(0.02)
    return 60.0


# -- those who do not read ---------------------------------------------------------------------------------------------


@section("slow readers")
def slow_readers(proof: Proof) -> None:
    """Normal readers with and without slow ones among them, in turns, over the same stretch of their streams."""
    num_slow, num_normal = proof.sized(quick=10, full=50), proof.sized(quick=30, full=150)
    num_tokens, stuck_s = proof.sized(quick=1_500, full=20_000), 2.0 if not proof.is_full else 30.0
    words = ("--running", "256", "--sequence-tokens", str(num_tokens + 200), "--send-buffer", "65536",
             "--blocks", str((num_slow + num_normal) * (num_tokens // 16 + 20)), "--stuck-s", str(stuck_s))  # fmt: skip
    with started(proof.folder, *words) as server:
        readers = Readers(server, num_tokens)
        among_slow, window_s = asyncio.run(readers.among_slow(num_normal, num_slow))
        base = asyncio.run(readers.among_quick(num_normal, num_slow, window_s))
        baseline_ms = percentile(base, 0.99) * 1000
        effect, num_gaps = percentile(among_slow, 0.99) * 1000 / baseline_ms, min(len(base), len(among_slow))
        settle(server)
        server.stop()
        num_cut = len(_cuts(server))
    proof.report("slow_baseline_p99_ms", baseline_ms)
    proof.report("slow_window_s", window_s, "while all slow readers are there")
    proof.holds("slow_window", window_s > 0, "there was one")
    proof.at_least("slow_gaps", num_gaps, 1000, "of each")
    proof.at_most("slow_reader_effect", effect, 1.2)
    proof.equals("slow_cut", num_cut, num_slow, "all of them")


def _cuts(server: Server) -> list[dict[str, Any]]:
    return [line for line in server.access_lines() if line.get("error") == "reader_too_slow"]


@dataclass
class Readers:
    """A crowd whose members all ask for the same; those it is about ask for log-probabilities too, to fill buffers."""

    server: Server
    num_tokens: int

    def _body(self, name: str, at: int) -> dict[str, Any]:
        more = {"logprobs": 5} if name == "other" else {}
        return {"model": "oracle", "max_tokens": self.num_tokens, "ignore_eos": True, "prompt": f"{name} {at}", **more}

    async def among_slow(self, num_normal: int, num_slow: int) -> tuple[list[float], float]:
        """Gaps of the normal ones from when all were there until the first slow one was cut, and how long that was."""
        num_before, over, enough = len(_cuts(self.server)), asyncio.Event(), asyncio.Event()
        slow = [slow_wire(self.server.port, self._body("other", at)) for at in range(num_slow)]
        dripping = asyncio.ensure_future(_drip(slow, over))
        first_cut = asyncio.ensure_future(self._first_cut(num_before))
        normal = asyncio.ensure_future(self._until(enough, "reader", num_normal))
        begun_s = time.perf_counter()
        cut_s = await first_cut
        deadline = time.perf_counter() + 60
        while time.perf_counter() < deadline and len(_cuts(self.server)) < num_before + num_slow:
            await asyncio.sleep(0.2)
        enough.set()
        streams = await normal
        over.set()
        await dripping
        return _gaps(streams, begun_s, cut_s), cut_s - begun_s

    async def among_quick(self, num_normal: int, num_more: int, window_s: float) -> list[float]:
        """The same, the others reading as quickly as anybody."""
        enough = asyncio.Event()
        others = asyncio.ensure_future(self._until(enough, "other", num_more))
        normal = asyncio.ensure_future(self._until(enough, "reader", num_normal))
        begun_s = time.perf_counter()
        await asyncio.sleep(window_s)
        enough.set()
        await others
        return _gaps(await normal, begun_s, begun_s + window_s)

    async def _until(self, enough: asyncio.Event, name: str, count: int) -> list[Streamed]:
        """Streams that are read until enough was seen of them; what comes after that is in no figure."""
        told = [Streamed() for _ in range(count)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session:
            asks = (stream_text(session, self.server.url, self._body(name, at), one) for at, one in enumerate(told))
            reading = asyncio.gather(*asks)
            await enough.wait()
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        for one in told:
            if one.status != 200 or one.errors:
                raise RuntimeError(f"a normal reader was cut: {one.status} {one.errors} {one.tail!r}")
        return told

    async def _first_cut(self, num_before: int) -> float:
        deadline = time.perf_counter() + 600
        while len(_cuts(self.server)) == num_before and time.perf_counter() < deadline:
            await asyncio.sleep(0.05)
        return time.perf_counter()


def _gaps(streams: list[Streamed], begun_s: float, ended_s: float) -> list[float]:
    """Times between tokens within the window."""
    return [
        later - earlier
        for one in streams
        for earlier, later in pairwise(one.moments)
        if begun_s <= earlier and later <= ended_s
    ]


async def _drip(wires: list[Any], over: asyncio.Event) -> None:
    """One byte a second from each."""
    for wire in wires:
        wire.setblocking(False)
    while not over.is_set():
        for wire in wires:
            try:
                wire.recv(1)
            except (BlockingIOError, ConnectionError):
                continue
        try:
            await asyncio.wait_for(over.wait(), 1.0)
        except TimeoutError:
            continue
    for wire in wires:
        wire.close()
