"""`make proof-doors`: real sockets, real workers; the oracle where counts matter, the real model where text does.

Needs the dev extra, and node and npm, which fetch the JavaScript SDK by its name.
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
    Server,
    Wires,
    listeners,
    percentile,
    phrase,
    read_later,
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
"""Whose sections come first. The listeners come last: they look at what all servers before them did."""


@dataclass(frozen=True, slots=True)
class Load:
    """How long requests are, and how long they are counted."""

    seconds: float
    lead_s: float
    """Before anything is counted: until it has got going."""
    max_tokens: tuple[int, int]
    dice: Random

    def body(self) -> dict[str, Any]:
        """A request."""
        limit = self.dice.randint(*self.max_tokens)
        prompt = phrase(self.dice, 30)
        return {"model": "m", "prompt": prompt, "max_tokens": limit, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Flooded:
    """What came of a flood."""

    capacity_rps: float
    offered: float
    """Of capacity."""
    goodput: float
    num_rejected: int
    num_without_retry: int
    reject_p99_ms: float
    memory_growth: float
    drift: float
    """How much more it could after the flood than before."""


@section("overload")
def overload(proof: Proof) -> None:
    """Ten times what it can do: what it does then, with answers of 16 to 64 tokens and with answers of 8 (`short_`).

    Ten times as many short ones is so many requests that turning them away, and asking, takes a good share of the
    machine's two cores. The bounds are the same.
    """
    seconds, lead_s = proof.sized(quick=8, full=60), proof.sized(quick=6, full=20)
    told = _flooded(proof.folder, Load(seconds, lead_s, (16, 64), proof.random))
    proof.report("overload_capacity_rps", told.capacity_rps)
    proof.report("overload_capacity_drift", told.drift, "after the flood over before it, minus 1")
    proof.at_least("overload_offered_ratio", told.offered, proof.sized(quick=0.0, full=9.5), "of capacity")
    proof.at_least("overload_rejected", told.num_rejected, 1)
    proof.equals("missing_retry_after", told.num_without_retry, 0)
    proof.at_most("reject_p99_ms", told.reject_p99_ms, 50)
    proof.at_least("goodput", told.goodput, 0.95)
    proof.at_most("memory_growth", told.memory_growth, 0.05, "parent and worker")
    short = _flooded(proof.folder, Load(seconds / 2, lead_s / 2, (8, 8), proof.random))
    proof.report("short_capacity_rps", short.capacity_rps)
    proof.report("short_capacity_drift", short.drift)
    proof.report("short_offered_ratio", short.offered)
    proof.equals("short_missing_retry_after", short.num_without_retry, 0)
    proof.at_most("short_reject_p99_ms", short.reject_p99_ms, 50)
    proof.at_least("short_goodput", short.goodput, 0.95)


def _flooded(folder: Path, load: Load) -> Flooded:
    words = serve_words("--queue", "64", "--max-open-requests", "128")
    with started(folder, *words, module="quire serve") as server:
        uvloop.run(_write_every_block(server, load.dice))
        first_rps = uvloop.run(_closed_loop(server, 64, load))
        before = server.resident_bytes()
        # A little more than ten times what was seen, so that it is ten times what capacity turns out to be.
        flood = Flood(server, 10.5 * first_rps, load)
        uvloop.run(flood.run())
        growth = server.resident_bytes() / before - 1
        # A shared machine drifts: what it can do is what it could before and after, half of the time each.
        last_rps = uvloop.run(_closed_loop(server, 64, load))
        server.stop()
    capacity = (first_rps + last_rps) / 2
    return Flooded(
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
    """The pool's pages are handed out when they are first written. What was promised at start is no growth."""
    engine = server.admin("/stats")["models"][0]["engine"]
    num_prompts = engine["num_blocks"] * engine["block_size"] // 1000 + 1
    with closing(Wires(server.port)) as wires:
        for _ in range(num_prompts):
            prompt = dice.choices(range(1000, 40_000), k=1000)
            answer = await wires.ask({"model": "m", "prompt": prompt, "max_tokens": 1})
            assert answer.status == 200, answer


async def _closed_loop(server: Server, num_clients: int, load: Load) -> float:
    """Requests a second with so many clients that each wait for their answer; counted once it has got going."""
    window_s = load.seconds / 2
    done, begin = 0, time.perf_counter() + load.lead_s
    end = begin + window_s

    async def client(wires: Wires) -> None:
        nonlocal done
        while time.perf_counter() < end:
            answer = await wires.ask(load.body())
            done += answer.status == 200 and begin <= time.perf_counter() < end

    with closing(Wires(server.port)) as wires:
        await asyncio.gather(*(client(wires) for _ in range(num_clients)))
    return done / window_s


class Flood:
    """Requests that come whether answered or not."""

    def __init__(self, server: Server, rate: float, load: Load) -> None:
        self._server = server
        self._rate = rate
        self._load = load
        self._begin_s = time.perf_counter() + load.lead_s
        self._end_s = self._begin_s + load.seconds
        self.num_offered = self.num_done = 0
        """Within the window."""
        self.rejected: list[tuple[float, bool]] = []
        """Milliseconds until turned away, and whether told when to come again."""

    async def run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        with closing(Wires(self._server.port)) as wires:
            next_s = time.perf_counter()
            # By the clock and not by sleeps: what comes late because the loop was busy comes all the same.
            while next_s < self._end_s:
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
                tasks.add(asyncio.ensure_future(self._one(wires)))
                next_s += self._load.dice.expovariate(self._rate)
            for task in tasks:
                await task

    def _is_counted(self, at_s: float) -> bool:
        return self._begin_s <= at_s < self._end_s

    async def _one(self, wires: Wires) -> None:
        begun_s = time.perf_counter()
        self.num_offered += self._is_counted(begun_s)
        body = self._load.body()
        answer = await wires.ask(body)
        now_s = time.perf_counter()
        if answer.status in (429, 503):
            self.rejected.append(((now_s - begun_s) * 1000, answer.has_retry))
        elif answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == body["max_tokens"]:
            self.num_done += self._is_counted(now_s)
        else:
            raise RuntimeError(f"{answer.status} under load: {answer.body!r}")


@section("http overhead")
def http_overhead(proof: Proof) -> None:
    """16 streams through HTTP and in process, in turns on the same machine.

    The client shares the machine's two cores with the server: it reads bytes, and looks at them when time has stopped.
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
    """Ratios of the rounds, and how many answers were not all that was asked for."""
    prompts = [f"The story number {at} of the {word} begins" for at, word in enumerate((WORDS * 2)[:16])]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    same = {"model": "m", "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    bodies = [{**same, "prompt": prompt} for prompt in prompts]
    ratios, num_wrong = [], 0
    async with AsyncEngine(open_model(str(smollm2_directory()), settings)) as engine:

        async def open_requests(prompt: str) -> int:
            num_said = 0
            async for piece in engine.stream(prompt, params):
                num_said += len(piece.token_ids)
            return num_said

        for at in range(rounds + 1):
            begun_s = time.perf_counter()
            counts = await asyncio.gather(*(open_requests(prompt) for prompt in prompts))
            between_s = time.perf_counter()
            streams = await asyncio.to_thread(stream_bytes, server.port, bodies)
            ended_s = time.perf_counter()
            num_wrong += sum(count != num_tokens for count in counts)
            num_wrong += sum(not read_later(one).is_whole(num_tokens) for one in streams)
            if at:  # the first round warms both
                ratios.append((between_s - begun_s) / (ended_s - between_s))
    return ratios, num_wrong


@section("listeners")
def listening(proof: Proof) -> None:
    """Where it and its worker listen: nowhere but on loopback unless asked, and then on one address."""
    folder, before = proof.folder, OUTBOUND.told("socket.bind")
    with started(folder) as server:
        at_home = _beyond_loopback(server)
    at_home += [one for one in OUTBOUND.told("socket.bind") if one not in before]
    keys = folder / "listeners.json"
    add_key(keys, "somebody")
    # In a network of its own, so that nobody is let in while it is looked at.
    alone = ("unshare", "--map-root-user", "--net") if shutil.which("unshare") else ()
    with started(folder, "--host", "0.0.0.0", "--keys-file", str(keys), before=alone) as server:  # noqa: S104
        abroad = _beyond_loopback(server)
    bound = OUTBOUND.told("socket.bind")
    num_told = len(bound) - len(before)
    proof.equals("listeners_default", len(at_home), 0, "beyond loopback")
    proof.equals("listeners", len(abroad), 1, "when asked for")
    proof.equals("listeners_told", num_told, 1, "as the process says of itself")
    beyond = OUTBOUND.beyond()
    proof.at_least("outbound_watched", OUTBOUND.num_processes, OUTBOUND.num_expected)
    proof.report("outbound_looks", OUTBOUND.num_looks)
    proof.holds("outbound_control", OUTBOUND.sees(), "it would be seen")
    proof.none("outbound", beyond, "connections to elsewhere")


def _beyond_loopback(server: Server) -> list[str]:
    return [one for pid in server.pids() for one in listeners(pid) if not LOOPBACK.match(one)]


PATHS = ("src/quire/api", "src/quire/client")

if __name__ == "__main__":
    sys.exit(run("doors", *PARTS, sys.modules[__name__], paths=PATHS))
