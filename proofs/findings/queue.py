"""The proof of the queue between keys: a flood by one does not turn another away, and a time that is told is true.

Real servers, real sockets, a real worker; the oracle computes, so that how much the server can do is known exactly.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import Server, percentile, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

STEP_S, RUNNING, QUEUE = 0.02, 4, 64
FLOOD_TOKENS, SHORT_TOKENS, LONG_TOKENS = 100, 4, 120
MAX_FLOODING = 400
"""Requests of the flood that are under way at once."""
FLOOD_RATIO = 100.0
"""Of the flood over the share that one of two tenants has of what the server can do."""
NEIGHBOUR_RPS, NEIGHBOUR_AT_ONCE = 10.0, 8
"""Well within its share of the queue, which is 26."""
LEAD_S = 3.0
"""The flood has filled the queue by then."""
WAITED_S, ANSWER_S = 2.0, 120.0
TENANTS = ("modest", "greedy")


@dataclass(frozen=True, slots=True)
class Told:
    """What came back, and when."""

    status: int
    retry_after_s: float | None
    at_s: float
    is_displaced: bool = False


@dataclass
class Client:
    """One key on one server."""

    session: aiohttp.ClientSession
    url: str
    tenant: str
    secret: str | None
    told: list[Told] = field(default_factory=list)

    async def ask(self, max_tokens: int) -> Told:
        """One answer; status 0 if none came."""
        try:
            told = await self._ask(max_tokens)
        except (aiohttp.ClientError, TimeoutError):
            told = Told(0, None, monotonic())
        self.told.append(told)
        return told

    async def _ask(self, max_tokens: int) -> Told:
        body = {"model": "oracle", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
        headers = {} if self.secret is None else {"authorization": f"Bearer {self.secret}"}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            data = await response.read()
            retry = response.headers.get("retry-after")
            is_displaced = b"displaced by another tenant" in data
            return Told(response.status, None if retry is None else float(retry), monotonic(), is_displaced)

    @property
    def refused(self) -> list[Told]:
        return [one for one in self.told if one.status in (429, 503)]


def new_session() -> aiohttp.ClientSession:
    limits = aiohttp.ClientTimeout(total=ANSWER_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)


def server_words(keys: Path | None) -> tuple[str, ...]:
    sizes = ("--step-s", str(STEP_S), "--running", str(RUNNING), "--queue", str(QUEUE))
    return (*sizes, *(() if keys is None else ("--keys-file", str(keys))))


async def cancel(tasks: "set[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- a neighbour -------------------------------------------------------------------------------------------------------


@section("queue: a neighbour's flood")
def neighbour(proof: Proof) -> None:
    """One key floods at 100 times its share, another sends a little, and nothing of that is turned away."""
    count = proof.sized(quick=100, full=500)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        secrets = [add_key(keys, tenant) for tenant in TENANTS]
        with started(Path(name), *server_words(keys)) as server:
            modest, greedy, seconds, num_sent = asyncio.run(_flooded(server, secrets, count))
            server.stop()
    share_rps = RUNNING / (FLOOD_TOKENS * STEP_S) / 2
    ratio = num_sent / seconds / share_rps
    num_refused = sum(one.status != 200 for one in modest.told)
    num_missing = sum(one.retry_after_s is None for one in greedy.refused)
    proof.at_least("neighbour_flood_ratio", ratio, 100, "times its share")
    proof.at_least("neighbour_flood_refused", len(greedy.refused), 1)
    proof.at_least("neighbour_flood_displaced", sum(one.is_displaced for one in greedy.refused), 1)
    proof.equals("neighbour_missing_retry", num_missing, 0)
    proof.equals("neighbour_asked", len(modest.told), count)
    proof.equals("neighbour_refused", num_refused, 0, f"of {count}")


async def _flooded(server: Server, secrets: list[str], count: int) -> tuple[Client, Client, float, int]:
    async with new_session() as session:
        modest, greedy = (
            Client(session, server.url, tenant, secret) for tenant, secret in zip(TENANTS, secrets, strict=True)
        )
        flood: set[asyncio.Task[Any]] = set()
        sent = [0]
        over = asyncio.Event()
        flooding = asyncio.create_task(_flood(greedy, flood, sent, over))
        await asyncio.sleep(LEAD_S)
        begin_s, num_before = monotonic(), sent[0]
        waits = await _paced(modest, count)
        seconds, num_sent = monotonic() - begin_s, sent[0] - num_before
        over.set()
        await flooding
        await cancel(flood)
    say(f"  the neighbour waited {statistics.median(waits):.2f} s, 95% {percentile(waits, 0.95):.2f} s")
    return modest, greedy, seconds, num_sent


async def _flood(greedy: Client, tasks: "set[asyncio.Task[Any]]", sent: list[int], over: asyncio.Event) -> None:
    """Requests that come whether answered or not."""
    rate = FLOOD_RATIO * 1.05 * RUNNING / (FLOOD_TOKENS * STEP_S) / 2
    begin_s, number = monotonic(), 0
    while not over.is_set():
        while number < (monotonic() - begin_s) * rate:
            number += 1
            if len(tasks) >= MAX_FLOODING:
                continue
            sent[0] += 1
            task = asyncio.create_task(greedy.ask(FLOOD_TOKENS))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)


async def _paced(modest: Client, count: int) -> list[float]:
    """One after the other begins, as a few agents would ask; how long each took."""
    waits: list[float] = []
    places = asyncio.Semaphore(NEIGHBOUR_AT_ONCE)

    async def one() -> None:
        sent_s = monotonic()
        await modest.ask(1)
        waits.append(monotonic() - sent_s)
        places.release()

    asking = []
    for _ in range(count):
        await places.acquire()
        asking.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / NEIGHBOUR_RPS)
    await asyncio.gather(*asking)
    return waits


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass
class Tries:
    """Retries at the time that was told."""

    num_tries: int = 0
    num_lies: int = 0
    waits: list[float] = field(default_factory=list)


@section("queue: times that are told")
def retries(proof: Proof) -> None:
    """Floods by many keys, each of which then stops, waits as long as it was told, and sends one request."""
    seconds = proof.sized(quick=24, full=240)
    several, alone = Tries(), Tries()
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        names = [f"tenant{at}" for at in range(8)]
        secrets: dict[str, str | None] = {tenant: add_key(keys, tenant) for tenant in names}
        with started(Path(name), *server_words(keys)) as server:
            asyncio.run(_tried(server, secrets, seconds, several))
            server.stop()
        with started(Path(name), *server_words(None)) as server:
            asyncio.run(_tried(server, {"default": None}, seconds / 2, alone))
            server.stop()
    proof.at_least("retry_tries", several.num_tries, proof.sized(quick=16, full=150))
    proof.at_least("retry_tries_alone", alone.num_tries, 1)
    proof.report("retry_after_median_s", statistics.median([*several.waits, *alone.waits] or [0.0]))
    proof.equals("retry_lies", several.num_lies + alone.num_lies, 0)


async def _tried(server: Server, secrets: Mapping[str, str | None], seconds: float, tries: Tries) -> None:
    end_s = monotonic() + seconds
    async with new_session() as session:
        clients = [Client(session, server.url, tenant, secret) for tenant, secret in secrets.items()]
        await asyncio.gather(*(_phases(server, client, end_s, tries) for client in clients))


async def _phases(server: Server, client: Client, end_s: float, tries: Tries) -> None:
    # One who is alone has the whole queue to fill; one of eight is refused beyond eight.
    num_sent = 2 * QUEUE if client.secret is None else QUEUE // 2
    # Some floods go fast and some stand still, so that a guess from how it went before is often wrong.
    for max_tokens in cycle((SHORT_TOKENS, LONG_TOKENS, LONG_TOKENS)):
        if monotonic() > end_s:
            return
        client.told.clear()
        burst = {asyncio.create_task(client.ask(max_tokens)) for _ in range(num_sent)}
        await _arrived(server, client, num_sent)
        if client.refused:
            await _try(client, burst, tries)
        await cancel(burst)


async def _arrived(server: Server, client: Client, num_sent: int) -> None:
    """The server has seen all of it: what is not answered is inside. From then on the tenant sends nothing."""
    while True:
        num_told = len(client.told)
        open_requests = (await asyncio.to_thread(server.admin, "/requests"))["requests"]
        if num_told + sum(one["tenant"] == client.tenant for one in open_requests) >= num_sent:
            return
        await asyncio.sleep(0.1)


async def _try(client: Client, burst: "set[asyncio.Task[Told]]", tries: Tries) -> None:
    """Wait, ask, and be answered; the flood is taken back once the answer waits with it for a while."""
    refused = client.refused[-1]
    retry_after_s = refused.retry_after_s or 0.0
    tries.waits.append(retry_after_s)
    await asyncio.sleep(refused.at_s + retry_after_s - monotonic())
    asking = asyncio.create_task(client.ask(SHORT_TOKENS))
    await asyncio.wait({asking}, timeout=WAITED_S)
    await cancel(burst)
    told = await asking
    tries.num_tries += 1
    if told.status != 200:
        tries.num_lies += 1
        say(f"  {client.tenant} was told {refused}, then {told}")
