"""Three models in the room of two, behind `quire serve`: asked, switched and killed, while their memory is looked at.

Every answer is compared with what the same model gave to the same prompt when it was alone: temperature 0, so a switch,
a kill or company may change nothing.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import aiohttp

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory, smollm2_file
from proofs.api.load import Server, children_of, phrase, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

NAMES = ("first", "second", "third")
MEMORY_BYTES, EACH_BYTES = 2_000_000_000, 900_000_000
NUM_OPEN = 6
NUM_PROMPTS = 12
MAX_TOKENS = 24
PHASE = 6
"""Requests to two of the three before the third is asked."""
LOOK_S = 0.02
QUEUE = 16
NUM_KEYS = 64
"""Clients that take turns, each a tenant of its own: one alone may have four models loaded in a minute."""
TOLD = ("", "model_loading", "server_overloaded")
"""An answer, or to come back: before the model is there, or when its own queue is full."""
STREAM = {
    "model": NAMES[0], "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 1
}  # fmt: skip
"""Drawn anew each time: what was said before would come many tokens at a time."""


@section("park of models")
def park(proof: Proof) -> None:
    """So many requests, in phases that ask for two of the three."""
    count, least_switches, num_kills = (
        proof.sized(quick=90, full=500), proof.sized(quick=10, full=40), proof.sized(quick=3, full=10)
    )  # fmt: skip
    seen = Seen()
    with serving(proof.folder, "--turn-s", "0.2") as server:
        asyncio.run(_references(server, seen, proof.random))
        with looked_at(server, seen):
            asyncio.run(_requests(server, seen, proof.random, count, num_kills))
            num_loads = sum("is being loaded" in line for line in server.lines)
            switching = asyncio.run(_switches(server, seen, proof.sized(quick=6, full=20)))
    for told in (seen.failed + seen.lost)[:6]:
        say(f"    {told}")
    proof.at_least("park_requests", seen.num_asked, count)
    proof.at_least("park_switches", num_loads - 2, least_switches, "models that were loaded in the room of another")
    proof.equals("park_kills", seen.num_killed, num_kills, "workers, some of which were loading")
    proof.equals("park_failed", len(seen.failed), 0, "answers that are no answer")
    proof.equals("park_lost", len(seen.lost), 0, "answers that are not what the model says alone")
    proof.equals("park_over", seen.num_over, 0, f"of {seen.num_looks} looks at the workers' memory")
    proof.report("park_memory_share", seen.most_bytes / MEMORY_BYTES, "the most that workers held at once")
    proof.report("switch_median_s", median(switching))
    proof.at_most("switch_s", max(switching), 4, "one leaves, another loads, its first token")


@section("waiting for a model that loads")
def waits(proof: Proof) -> None:
    """A stream of a model that is kept, while others are loaded and flooded with requests."""
    rounds = proof.sized(quick=2, full=5)
    flood = Flood()
    words = ("--turn-s", "0", "--queue", str(QUEUE))
    with serving(proof.folder, *words, keeps=NAMES[:1]) as server:
        asyncio.run(_stream_gaps(server))
        ratios = []
        for _ in range(rounds):
            alone = asyncio.run(_stream_gaps(server))
            beside = asyncio.run(_stream_gaps(server, flood))
            ratios.append(beside / alone)
            say(f"    p95 gap {alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms beside a model that loads")
    told = {code: flood.codes.count(code) for code in set(flood.codes)}
    say(f"    the flood was told {told}")
    proof.at_least("park_turned_away", flood.codes.count("model_loading"), rounds, "beyond the queue's bounds")
    proof.equals("park_without_retry", flood.num_without_retry, 0)
    strange = len([code for code in flood.codes if code not in TOLD])
    proof.equals("park_waits_failed", strange, 0, "that were neither answered nor told to come back")
    proof.at_most("park_waits", median(ratios), 1.5, "p95 gap between tokens over without")


@dataclass
class Clients:
    """Whose key the next request has."""

    secrets: Iterator[str] = field(default_factory=lambda: iter(()))

    def next(self) -> dict[str, str]:
        """Its headers."""
        return {"x-api-key": next(self.secrets)}


CLIENTS = Clients()


# -- a server ----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, *words: str, keeps: Sequence[str] = ()) -> Iterator[Server]:
    """Three models and the memory of two, and many keys."""
    keys = folder / "keys.json"
    keys.unlink(missing_ok=True)
    CLIENTS.secrets = cycle([add_key(keys, f"client-{at}") for at in range(NUM_KEYS)])
    again = folder / "third.gguf"
    if not again.exists():
        again.symlink_to(smollm2_file())
    places = (smollm2_file(), smollm2_directory(), again)
    lines = [f'memory = "{MEMORY_BYTES}"', "max_model_len = 1024", "max_running = 8"]
    for name, place in zip(NAMES, places, strict=True):
        lines += [f"[models.{name}]", f'model = "{place}"', f'memory = "{EACH_BYTES}"']
        lines += ["keep = true"] * (name in keeps)
    config = folder / "park.toml"
    config.write_text("\n".join(lines))
    with started(folder, "--config", str(config), "--keys-file", str(keys), *words, module="quire serve") as server:
        yield server


def worker_pids(server: Server) -> list[int]:
    """Processes of models: helpers that render and check are not."""
    found = []
    for pid in children_of(server.pid):
        with suppress(OSError):
            if b"quire.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@dataclass
class Seen:
    """What came of it."""

    num_asked: int = 0
    num_killed: int = 0
    failed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_looks: int = 0
    num_over: int = 0
    most_bytes: int = 0
    alone: dict[tuple[str, str], str] = field(default_factory=dict)
    """What each model says to each prompt."""

    def look(self, server: Server) -> None:
        """At what all workers hold."""
        held = sum(resident_bytes(pid) for pid in worker_pids(server))
        self.num_looks += 1
        self.num_over += held > MEMORY_BYTES
        self.most_bytes = max(self.most_bytes, held)


@contextmanager
def looked_at(server: Server, seen: Seen) -> Iterator[None]:
    """Again and again, beside what is done meanwhile."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            seen.look(server)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- those who ask -----------------------------------------------------------------------------------------------------


def _body(model: str, prompt: str, max_tokens: int = MAX_TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more
    }  # fmt: skip


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))


async def _references(server: Server, seen: Seen, random: Random) -> None:
    prompts = [phrase(random) for _ in range(NUM_PROMPTS)]
    async with _session() as session:
        for name in NAMES:
            for prompt in prompts:
                async with session.post(
                    f"{server.url}/v1/completions", json=_body(name, prompt), headers=CLIENTS.next()
                ) as response:
                    seen.alone[name, prompt] = (await response.json())["choices"][0]["text"]


async def _requests(server: Server, seen: Seen, random: Random, count: int, num_kills: int) -> None:
    """A few at once; every phase asks for another pair of models. Between them workers are killed."""
    gate = asyncio.Semaphore(NUM_OPEN)
    prompts = sorted({prompt for _, prompt in seen.alone})
    kills = set(random.sample(range(PHASE, count - PHASE), num_kills))

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        away = number // PHASE % len(NAMES)
        name = random.choice([name for at, name in enumerate(NAMES) if at != away])
        async with gate:
            if number in kills:
                await _kill(server, seen, random)
            await _compared(session, server, seen, name, random.choice(prompts), random.random() < 0.5)

    async with _session() as session:
        await asyncio.gather(*(one(session, number) for number in range(count)))


async def _kill(server: Server, seen: Seen, random: Random) -> None:
    while not (pids := worker_pids(server)):
        await asyncio.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(random.choice(pids), signal.SIGKILL)
        seen.num_killed += 1


async def _compared(
    session: aiohttp.ClientSession, server: Server, seen: Seen, name: str, prompt: str, is_streamed: bool
) -> None:
    seen.num_asked += 1
    try:
        if is_streamed:
            text = "".join([delta async for delta in _deltas(session, server, _body(name, prompt))])
        else:
            async with session.post(
                f"{server.url}/v1/completions", json=_body(name, prompt), headers=CLIENTS.next()
            ) as response:
                text = (await response.json())["choices"][0]["text"]
    except (aiohttp.ClientError, LookupError, RuntimeError, TimeoutError) as error:
        seen.failed.append(f"{name}: {error!r}")
        return
    if text != seen.alone[name, prompt]:
        seen.lost.append(f"{name} said {text[:60]!r}, alone {seen.alone[name, prompt][:60]!r}")


async def _deltas(session: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> Any:
    is_ended = False
    async with session.post(
        f"{server.url}/v1/completions", json={**body, "stream": True}, headers=CLIENTS.next()
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status} {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_ended = True
            elif line.startswith(b"data: "):
                told = json.loads(line.removeprefix(b"data: "))
                if "error" in told:
                    raise RuntimeError(told["error"]["message"])
                for choice in told["choices"]:
                    yield choice["text"]
    if not is_ended:
        raise RuntimeError("a stream without an end")


async def _switches(server: Server, seen: Seen, count: int) -> list[float]:
    """One after the other: always the model that is not here."""
    taken = []
    prompt = next(iter(seen.alone))[1]
    async with _session() as session:
        for _ in range(count):
            await asyncio.sleep(0.3)  # those that are here have stayed their least time
            away = [one["name"] for one in server.admin("/stats")["models"] if one["state"] == "unloaded"]
            begun_s = time.perf_counter()
            deltas = _deltas(session, server, _body(away[0], prompt))
            await anext(deltas)
            taken.append(time.perf_counter() - begun_s)
            async for _ in deltas:
                pass
    return taken


# -- beside a model that loads -----------------------------------------------------------------------------------------


@dataclass
class Flood:
    """What those were told who asked for a model that was being loaded."""

    codes: list[str] = field(default_factory=list)
    """Empty for an answer."""
    num_without_retry: int = 0

    async def ask(self, session: aiohttp.ClientSession, server: Server, name: str) -> None:
        async with session.post(
            f"{server.url}/v1/completions", json=_body(name, "hello", 2), headers=CLIENTS.next()
        ) as response:
            told = await response.json()
            self.codes.append(told.get("error", {}).get("code", ""))
            self.num_without_retry += response.status == 503 and "retry-after" not in response.headers


async def _stream_gaps(server: Server, flood: Flood | None = None) -> float:
    """The 95th percentile of the time between two tokens of the model that is kept, while another loads if there is a
    flood: it is asked for again and again, and so is the third, which does not fit beside it."""
    times: list[float] = []
    async with _session() as session:

        async def flooded(stop: asyncio.Event) -> None:
            number = 0
            while not stop.is_set():
                name = NAMES[1 + number % 2]
                number += 1
                assert flood is not None
                await asyncio.gather(*(flood.ask(session, server, name) for _ in range(2 * QUEUE)))

        stop = asyncio.Event()
        flooding = asyncio.ensure_future(flooded(stop)) if flood is not None else None
        async for _ in _deltas(session, server, STREAM):
            times.append(time.perf_counter())
        stop.set()
        if flooding is not None:
            await flooding
    gaps = [after - before for before, after in pairwise(times)]
    return quantiles(gaps, n=20)[-1]
