"""The proof of the queue: one key's flood does not get another key's requests refused, and `Retry-After` is right.

Real servers, sockets and workers run an oracle, a simulated model, so that the throughput of the server is known.
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
MAX_OPEN = 400
"""Requests of the flood that are open at once, at most."""
FLOOD_RATIO = 100.0
"""The flood's requests per second over half of those that the server can answer: one of two tenants' share."""
NEIGHBOUR_RPS, NEIGHBOUR_AT_ONCE = 10.0, 8
"""The neighbour's requests per second, and at once; its share of the queue is 26."""
LEAD_S = 3.0
"""Within this time the flood fills the queue."""
WAITED_S, ANSWER_S = 2.0, 120.0
TENANTS = ("modest", "greedy")


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and `Retry-After` of an answer, and when it came."""

    status: int
    retry_after_s: float | None
    time_s: float
    is_displaced: bool = False


@dataclass
class Client:
    """One key on one server."""

    session: aiohttp.ClientSession
    url: str
    tenant: str
    secret: str | None
    answers: list[Answer] = field(default_factory=list)

    async def ask(self, max_tokens: int) -> Answer:
        """Send one request; the status is 0 if the connection broke or timed out."""
        try:
            answer = await self._ask(max_tokens)
        except (aiohttp.ClientError, TimeoutError):
            answer = Answer(0, None, monotonic())
        self.answers.append(answer)
        return answer

    async def _ask(self, max_tokens: int) -> Answer:
        body = {"model": "oracle", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
        headers = {} if self.secret is None else {"authorization": f"Bearer {self.secret}"}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            data = await response.read()
            retry = response.headers.get("retry-after")
            is_displaced = b"displaced by another tenant" in data
            return Answer(response.status, None if retry is None else float(retry), monotonic(), is_displaced)

    @property
    def refusals(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status in (429, 503)]


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
    """One key floods at 100 times its share; none of the few requests of another key is refused."""
    count = proof.sized(quick=100, full=500)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        secrets = [add_key(keys, tenant) for tenant in TENANTS]
        with started(Path(name), *server_words(keys)) as server:
            modest, greedy, seconds, num_sent = asyncio.run(_measure_flood(server, secrets, count))
            server.stop()
    share_rps = RUNNING / (FLOOD_TOKENS * STEP_S) / 2
    ratio = num_sent / seconds / share_rps
    num_refused = sum(answer.status != 200 for answer in modest.answers)
    num_missing = sum(answer.retry_after_s is None for answer in greedy.refusals)
    proof.at_least("neighbour_flood_ratio", ratio, 100, "times its share")
    proof.at_least("neighbour_flood_refused", len(greedy.refusals), 1)
    proof.at_least("neighbour_flood_displaced", sum(answer.is_displaced for answer in greedy.refusals), 1)
    proof.equals("neighbour_missing_retry", num_missing, 0)
    proof.equals("neighbour_asked", len(modest.answers), count)
    proof.equals("neighbour_refused", num_refused, 0, f"of {count}")


async def _measure_flood(server: Server, secrets: list[str], count: int) -> tuple[Client, Client, float, int]:
    async with new_session() as session:
        modest, greedy = (
            Client(session, server.url, tenant, secret) for tenant, secret in zip(TENANTS, secrets, strict=True)
        )
        flood: set[asyncio.Task[Any]] = set()
        num_sent = [0]
        is_over = asyncio.Event()
        flood_task = asyncio.create_task(_flood(greedy, flood, num_sent, is_over))
        await asyncio.sleep(LEAD_S)
        begin_s, num_before = monotonic(), num_sent[0]
        waits_s = await _send_paced(modest, count)
        seconds, num_flood = monotonic() - begin_s, num_sent[0] - num_before
        is_over.set()
        await flood_task
        await cancel(flood)
    say(f"  the neighbour waited {statistics.median(waits_s):.2f} s, 95% {percentile(waits_s, 0.95):.2f} s")
    return modest, greedy, seconds, num_flood


async def _flood(greedy: Client, tasks: "set[asyncio.Task[Any]]", num_sent: list[int], is_over: asyncio.Event) -> None:
    """Send requests at a fixed rate, and count them in `num_sent[0]`."""
    rate = FLOOD_RATIO * 1.05 * RUNNING / (FLOOD_TOKENS * STEP_S) / 2
    begin_s, number = monotonic(), 0
    while not is_over.is_set():
        while number < (monotonic() - begin_s) * rate:
            number += 1
            if len(tasks) >= MAX_OPEN:
                continue
            num_sent[0] += 1
            task = asyncio.create_task(greedy.ask(FLOOD_TOKENS))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)


async def _send_paced(modest: Client, count: int) -> list[float]:
    """Send requests at a fixed rate, a few at once; returns how long each took."""
    waits_s: list[float] = []
    slots = asyncio.Semaphore(NEIGHBOUR_AT_ONCE)

    async def send() -> None:
        start_s = monotonic()
        await modest.ask(max_tokens=1)
        waits_s.append(monotonic() - start_s)
        slots.release()

    tasks = []
    for _ in range(count):
        await slots.acquire()
        tasks.append(asyncio.create_task(send()))
        await asyncio.sleep(1 / NEIGHBOUR_RPS)
    await asyncio.gather(*tasks)
    return waits_s


# -- Retry-After -------------------------------------------------------------------------------------------------------


@dataclass
class Tries:
    """Retries after the time in `Retry-After`; `num_lies` of them were not answered with 200."""

    num_tries: int = 0
    num_lies: int = 0
    waits_s: list[float] = field(default_factory=list)


@section("queue: times that are told")
def retries(proof: Proof) -> None:
    """Keys flood the server; then each stops, waits for the time in `Retry-After`, and sends one request."""
    seconds = proof.sized(quick=24, full=240)
    several, single = Tries(), Tries()
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        names = [f"tenant{number}" for number in range(8)]
        secrets: dict[str, str | None] = {tenant: add_key(keys, tenant) for tenant in names}
        with started(Path(name), *server_words(keys)) as server:
            asyncio.run(_retry(server, secrets, seconds, several))
            server.stop()
        with started(Path(name), *server_words(None)) as server:
            asyncio.run(_retry(server, {"default": None}, seconds / 2, single))
            server.stop()
    proof.at_least("retry_tries", several.num_tries, proof.sized(quick=16, full=150))
    proof.at_least("retry_tries_alone", single.num_tries, 1)
    proof.report("retry_after_median_s", statistics.median([*several.waits_s, *single.waits_s] or [0.0]))
    proof.equals("retry_lies", several.num_lies + single.num_lies, 0)


async def _retry(server: Server, secrets: Mapping[str, str | None], seconds: float, tries: Tries) -> None:
    end_s = monotonic() + seconds
    async with new_session() as session:
        clients = [Client(session, server.url, tenant, secret) for tenant, secret in secrets.items()]
        await asyncio.gather(*(_phases(server, client, end_s, tries) for client in clients))


async def _phases(server: Server, client: Client, end_s: float, tries: Tries) -> None:
    # A single tenant may fill the whole queue; one of eight tenants is refused beyond eight requests.
    num_sent = 2 * QUEUE if client.secret is None else QUEUE // 2
    # Floods have short or long answers, so that an estimate from earlier ones is often wrong.
    for max_tokens in cycle((SHORT_TOKENS, LONG_TOKENS, LONG_TOKENS)):
        if monotonic() > end_s:
            return
        client.answers.clear()
        burst = {asyncio.create_task(client.ask(max_tokens)) for _ in range(num_sent)}
        await _until_arrived(server, client, num_sent)
        if client.refusals:
            await _try(client, burst, tries)
        await cancel(burst)


async def _until_arrived(server: Server, client: Client, num_sent: int) -> None:
    """Wait until the server has all of the tenant's requests: those without an answer are open."""
    while True:
        num_answers = len(client.answers)
        open_requests = (await asyncio.to_thread(server.admin, "/requests"))["requests"]
        if num_answers + sum(one["tenant"] == client.tenant for one in open_requests) >= num_sent:
            return
        await asyncio.sleep(0.1)


async def _try(client: Client, burst: "set[asyncio.Task[Answer]]", tries: Tries) -> None:
    """Wait for the time in `Retry-After`, and send a request; WAITED_S later, cancel the flood."""
    refusal = client.refusals[-1]
    retry_after_s = refusal.retry_after_s or 0.0
    tries.waits_s.append(retry_after_s)
    await asyncio.sleep(refusal.time_s + retry_after_s - monotonic())
    task = asyncio.create_task(client.ask(SHORT_TOKENS))
    await asyncio.wait({task}, timeout=WAITED_S)
    await cancel(burst)
    answer = await task
    tries.num_tries += 1
    if answer.status != 200:
        tries.num_lies += 1
        say(f"  {client.tenant}: first {refusal}, then {answer}")
