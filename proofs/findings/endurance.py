"""Sections about long runs of a real server: memory over thousands of requests of each kind, a wall clock that jumps,
and file descriptors that run out. `quire serve` runs a small model in all of them.

Memory is measured while no request runs: of the server's process, of its worker, and of its largest helper process. The
first measurement comes after all blocks of the KV pool were used, and all bounded caches and stores were full.
"""

import asyncio
import itertools
import json
import os
import resource
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.record import say
from proofs.api.load import WORDS, Server, children_of, phrase, started
from proofs.framework.proof import Proof, section
from tests.support.models.tiny_models import Tiny, make_directory

MIB = 1 << 20
MODEL = Tiny(hidden=128, metadata={"llama.context_length": 512})
NUM_CLIENTS = 24
NUM_PARTS = 10
ROLES = ("parent", "worker", "helper")
MAX_TURNS = 3
MAX_GROWTH, MAX_GROWTH_BYTES = 0.02, 4 * MIB
SETTLE_S = 20.0
MOVED_CLOCK = Path(__file__).with_name("moved_clock.c")
JUMPS_S = (3_600, -3_600, 86_400, -86_400)
FEW_DESCRIPTORS = 64
REFUSED = 503
Send = Callable[["Client", int], Coroutine[Any, Any, bool]]


@contextmanager
def _serving(proof: Proof, *more: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    model = make_directory(proof.folder / f"model-{time.monotonic_ns()}", tiny=MODEL)
    words = ("--served-model-name", "m", "--memory", "600MiB", "--max-running", "16", "--tool-format", "hermes", *more)
    with started(proof.folder, str(model), *words, module="quire serve", environment=environment) as server:
        _await_ready(server)
        yield server


def _await_ready(server: Server) -> None:
    deadline_s = time.monotonic() + 300
    while not all(model["state"] == "ready" for model in server.admin("/stats")["models"]):
        if server.has_ended or time.monotonic() > deadline_s:
            raise RuntimeError("\n".join(server.lines[-20:]))
        time.sleep(0.1)


# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Client:
    """One of the clients that send at the same time, over connections that stay open."""

    session: aiohttp.ClientSession
    url: str
    dice: Random
    response_ids: list[str] = field(default_factory=list)
    """Stored responses of a conversation; a new one begins before the model's context is full."""

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Send a request; returns the status and the whole body of the answer."""
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.read()

    def text(self, max_words: int = 12) -> str:
        return phrase(self.dice, max_words)

    def chat(self, **more: Any) -> dict[str, Any]:
        return {"model": "m", "messages": [{"role": "user", "content": self.text()}], "max_tokens": 4, **more}


@asynccontextmanager
async def _clients(server: Server, dice: Random, count: int) -> AsyncIterator[list[Client]]:
    connector = aiohttp.TCPConnector(limit=count)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        yield [Client(session, server.url, Random(dice.getrandbits(64))) for _ in range(count)]


async def _completion(client: Client, number: int) -> bool:
    body = {"model": "m", "prompt": client.text(60), "max_tokens": 4, "stream": number % 2 == 0}
    return (await client.post("/v1/completions", body))[0] == 200


async def _chat(client: Client, number: int) -> bool:
    return (await client.post("/v1/chat/completions", client.chat(stream=number % 2 == 0)))[0] == 200


async def _tools(client: Client, number: int) -> bool:
    body = client.chat(tools=[_tool(number)], stream=number % 2 == 0)
    return (await client.post("/v1/chat/completions", body))[0] == 200


def _tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}
    return {"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}}


async def _lark(client: Client, number: int) -> bool:
    return (await client.post("/v1/chat/completions", client.chat(grammar=f'start: "a"+ "{number}"')))[0] == 200


async def _schema(client: Client, number: int) -> bool:
    names = {f"{word}{number}": {"type": "string"} for word in WORDS[:8]}
    schema = {"name": "s", "schema": {"type": "object", "properties": names}}
    body = client.chat(response_format={"type": "json_schema", "json_schema": schema})
    return (await client.post("/v1/chat/completions", body))[0] == 200


async def _choice(client: Client, number: int) -> bool:
    guided = {"choice": [f"yes {number}", "no"]} if number % 2 else {"regex": f"[ab]{{1,8}}{number}"}
    return (await client.post("/v1/chat/completions", client.chat(**guided)))[0] == 200


async def _many_answers(client: Client, _number: int) -> bool:
    body = {"model": "m", "prompt": client.text(), "max_tokens": 6, "n": 4, "logprobs": 3, "stop": ["e", "xyz"]}
    return (await client.post("/v1/completions", body))[0] == 200


async def _stored_response(client: Client, _number: int) -> bool:
    body = {"model": "m", "input": client.text(), "max_output_tokens": 4, "store": True}
    if client.response_ids:
        body["previous_response_id"] = client.response_ids[-1]
    status, data = await client.post("/v1/responses", body)
    goes_on = status == 200 and len(client.response_ids) < MAX_TURNS
    client.response_ids = [*client.response_ids, json.loads(data)["id"]] if goes_on else []
    return status == 200


async def _message(client: Client, number: int) -> bool:
    body = {**client.chat(stream=number % 2 == 0), "system": client.text()}
    return (await client.post("/v1/messages", body))[0] == 200


async def _disconnect(client: Client, _number: int) -> bool:
    """Close the connection once the first bytes have come."""
    body = client.chat(stream=True, max_tokens=200)
    async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as response:
        await response.content.readany()
        response.close()
        return response.status == 200


async def _explain(client: Client, number: int) -> bool:
    path = ("/v1/cache/explain", "/tokenize")[number % 2]
    body = {"model": "m", "prompt": client.text(40)}
    return (await client.post(path, body))[0] == 200


async def _refusal(client: Client, number: int) -> bool:
    bodies: tuple[dict[str, Any], ...] = (
        client.chat(max_tokens=100_000), client.chat(grammar="start: ("), {"model": f"m{number}", "messages": []},
        client.chat(temperature=f"{number}"),
    )  # fmt: skip
    return (await client.post("/v1/chat/completions", bodies[number % 4]))[0] in (400, 404)


KINDS: Mapping[str, Send] = {
    "completion": _completion, "chat": _chat, "tools": _tools, "lark": _lark, "schema": _schema, "choice": _choice,
    "many": _many_answers, "stored": _stored_response, "message": _message, "leaving": _disconnect,
    "explained": _explain, "refused": _refusal,
}  # fmt: skip
WITH_GRAMMARS = ("tools", "lark", "schema", "choice")


async def _send_all(server: Server, dice: Random, send: Send, numbers: Sequence[int]) -> int:
    """Send a request for each number, by NUM_CLIENTS clients; returns how many got a wrong status."""
    remaining, num_failed = iter(numbers), 0

    async def send_next(client: Client) -> None:
        nonlocal num_failed
        for number in remaining:
            if not await send(client, number):
                num_failed += 1
                say(f"    {send.__name__} {number}: unexpected status")

    async with _clients(server, dice, NUM_CLIENTS) as clients:
        await asyncio.gather(*(send_next(client) for client in clients))
    return num_failed


# -- leaks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident bytes of an idle server's processes, and its open descriptors."""

    parent: int
    worker: int
    helper: int
    """Of the largest helper process."""
    num_descriptors: int

    def growth_since(self, before: "Usage") -> dict[str, int]:
        """By how many bytes each process grew, of those that grew more than is allowed."""
        growth = {}
        for role in ROLES:
            old, new = getattr(before, role), getattr(self, role)
            if new - old > max(MAX_GROWTH * old, MAX_GROWTH_BYTES):
                growth[role] = new - old
        return growth


def _usage(server: Server) -> Usage:
    """Measure a server without clients, once their connections are closed."""
    pids = children_of(server.pid)
    workers = [pid for pid in pids if "quire.worker" in _command(pid)]
    helpers = [_resident(pid) for pid in pids if pid not in workers]
    return Usage(
        _resident(server.pid), sum(map(_resident, workers)), max(helpers, default=0), _settled_descriptors(server)
    )


def _settled_descriptors(server: Server) -> int:
    """The number of open descriptors, once it has not fallen for half a second."""
    min_count, since_s = server.num_descriptors(), time.monotonic()
    while time.monotonic() - since_s < 0.5:
        time.sleep(0.1)
        if (count := server.num_descriptors()) < min_count:
            min_count, since_s = count, time.monotonic()
    return min_count


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    return ""


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _fill(server: Server, dice: Random, num_grammars: int) -> int:
    """Use all blocks of the pool; fill the caches of grammars and prompts, the store, and the ring of requests."""
    num_failed = 0
    for name, send in KINDS.items():
        count = num_grammars if name in WITH_GRAMMARS else num_grammars * 3 // 4
        num_failed += asyncio.run(_send_all(server, dice, send, range(count)))
    return num_failed


@section("endurance: leaks")
def leaks(proof: Proof) -> None:
    """Measure after the second tenth of each kind's requests and after the last; no cache holds all the grammars."""
    dice, count = proof.random, proof.sized(quick=200, full=3_000)
    num_grammars = proof.sized(quick=100, full=1_200)
    num_grown = num_open = max_bytes = 0
    with _serving(proof, "--store", str(proof.folder / "kept.db"), "--store-size", "1MiB") as server:
        num_failed = _fill(server, dice, num_grammars)
        for name, send in KINDS.items():
            numbers = itertools.cycle(range(num_grammars))
            usages: list[Usage] = []
            for num_parts in (2, NUM_PARTS - 2):
                part = list(itertools.islice(numbers, num_parts * count // NUM_PARTS))
                num_failed += asyncio.run(_send_all(server, dice, send, part))
                usages.append(_usage(server))
            second, last = usages
            growth = last.growth_since(second)
            num_grown += len(growth)
            num_open += max(0, last.num_descriptors - second.num_descriptors)
            max_bytes = max(max_bytes, *(getattr(last, role) - getattr(second, role) for role in ROLES))
            say(f"    {name}: {_summary(second)} then {_summary(last)} {growth or ''}")
        restarts = server.num_restarts()
    proof.report("leaks_requests", count * len(KINDS))
    proof.report("leaks_worst_mb", round(max_bytes / MIB, 2))
    proof.equals("leaks_failed", num_failed + restarts, 0, "requests with unexpected status, and workers lost")
    proof.equals("leaks", num_grown, 0, f"processes that grew by more than 2% and {MAX_GROWTH_BYTES // MIB} MiB")
    proof.equals("leaks_descriptors", num_open, 0, "more than after the second tenth")


def _summary(usage: Usage) -> str:
    return "/".join(f"{getattr(usage, role) / MIB:.1f}" for role in ROLES) + f" MiB, {usage.num_descriptors} open;"


# -- the wall clock ----------------------------------------------------------------------------------------------------


@section("endurance: the wall clock jumps")
def clock(proof: Proof) -> None:
    """Move the wall clock by an hour and by a day, forwards and backwards, while requests of all kinds run."""
    dice, count = proof.random, proof.sized(quick=8, full=50)
    library, offset_file = proof.folder / "moved_clock.so", proof.folder / "moved-by"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, MOVED_CLOCK, "-ldl"], check=True)
    offset_file.write_bytes(struct.pack("q", 0))
    environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK_FILE": str(offset_file)}
    with _serving(proof, "--store", str(proof.folder / "clock.db"), environment=environment) as server:
        num_seen, num_failed, num_sent = 0, 0, 0
        for number in range(count):
            jump = asyncio.run(_jump(server, dice, offset_file, JUMPS_S[number % len(JUMPS_S)]))
            num_sent, num_failed = num_sent + jump.num_sent, num_failed + jump.num_failed
            num_seen += jump.is_seen
        is_normal = _is_normal(server)
        restarts = server.num_restarts()
    proof.report("clock_requests", num_sent)
    proof.equals("clock_jumps_seen", num_seen, count, "by the server: `created` of an answer moves with the clock")
    proof.equals("clock_jumps", num_failed, 0, "requests that failed")
    proof.equals("clock_workers_lost", restarts, 0)
    proof.holds("clock_back_to_normal", is_normal, "always")


@dataclass(frozen=True, slots=True)
class Jump:
    """What happened to requests while the clock jumped."""

    num_sent: int
    num_failed: int
    is_seen: bool


async def _jump(server: Server, dice: Random, offset_file: Path, jump_s: int) -> Jump:
    """Move the clock while requests run, and move it back while more requests run."""
    kinds = [send for name, send in KINDS.items() if name != "leaving"]
    async with _clients(server, dice, len(kinds)) as clients:
        before_s = await _created(clients[0])
        tasks = [asyncio.ensure_future(kinds[i % len(kinds)](client, i)) for i, client in enumerate(clients)]
        await asyncio.sleep(0.02)
        _write_offset(offset_file, jump_s)
        successes = await asyncio.gather(*tasks)
        after_s = await _created(clients[0])
        tasks = [asyncio.ensure_future(kinds[i % len(kinds)](client, i)) for i, client in enumerate(clients)]
        await asyncio.sleep(0.02)
        _write_offset(offset_file, 0)
        successes += await asyncio.gather(*tasks)
    is_seen = abs(after_s - before_s - jump_s) < 600
    return Jump(len(successes), successes.count(False), is_seen)


def _write_offset(offset_file: Path, offset_s: int) -> None:
    """Overwrite the file in place: the server has mapped it."""
    with offset_file.open("r+b") as file:
        file.write(struct.pack("q", offset_s))


async def _created(client: Client) -> int:
    _, data = await client.post("/v1/chat/completions", client.chat())
    return int(json.loads(data)["created"])


def _is_normal(server: Server) -> bool:
    """Whether all models are ready and requests of every kind succeed."""

    async def num_failed() -> list[int]:
        return [await _send_all(server, Random(1), send, range(4)) for send in KINDS.values()]

    ready = all(model["state"] == "ready" for model in server.admin("/stats")["models"])
    return ready and not any(asyncio.run(num_failed()))


# -- descriptors -------------------------------------------------------------------------------------------------------


@section("endurance: descriptors run out")
def descriptors(proof: Proof) -> None:
    """Leave a running server 64 free descriptors, and open more connections than that at once."""
    dice, rounds, num_clients = proof.random, proof.sized(quick=3, full=12), proof.sized(quick=200, full=400)
    num_failed = num_refused = num_sent = 0
    is_normal = True
    with _serving(proof, "--store", str(proof.folder / "few.db")) as server:
        asyncio.run(_flood(server, dice, num_clients=16))  # starts the helpers, as on a server in use
        for number in range(rounds):
            limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in server.pids()}
            for pid, (_, hard_limit) in limits.items():
                soft_limit = len(list(Path(f"/proc/{pid}/fd").iterdir())) + FEW_DESCRIPTORS
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
            statuses = asyncio.run(_flood(server, dice, num_clients))
            for pid, old_limits in limits.items():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, old_limits)
            num_sent += len(statuses)
            num_refused += statuses.count(REFUSED)
            wrong = [status for status in statuses if status not in (200, REFUSED)]
            num_failed += len(wrong)
            if wrong:
                say(f"    round {number}: {len(wrong)} of {len(statuses)} failed: {sorted(set(map(str, wrong)))[:5]}")
            is_normal = is_normal and _is_normal(server)
        restarts = server.num_restarts()
    proof.report("fd_requests", num_sent)
    proof.report("fd_refused", num_refused, "with 503")
    proof.equals("fd_exhaustion", num_failed, 0, "requests that failed otherwise")
    proof.equals("fd_workers_lost", restarts, 0)
    proof.holds("fd_back_to_normal", is_normal, "always")


async def _flood(server: Server, dice: Random, num_clients: int) -> list[int | str]:
    """Send one request each by so many clients at once, over new connections; returns statuses, or names of errors."""

    async def send(number: int) -> int | str:
        client = Client(session, server.url, Random(dice.getrandbits(64)))
        path, body = _flood_request(client, number)
        try:
            return (await client.post(path, body))[0]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return type(error).__name__

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        return await asyncio.gather(*(send(number) for number in range(num_clients)))


def _flood_request(client: Client, number: int) -> tuple[str, dict[str, Any]]:
    """The path and body of a request for which the server may open more descriptors: of helpers, or of the store."""
    match number % 4:
        case 0:
            return "/v1/chat/completions", client.chat(max_tokens=64, stream=True)
        case 1:
            return "/v1/responses", {"model": "m", "input": client.text(), "max_output_tokens": 16, "store": True}
        case 2:
            return "/v1/chat/completions", client.chat(grammar=f'start: "b"+ "{number}"')
        case _:
            return "/v1/completions", {"model": "m", "prompt": client.text(40), "max_tokens": 32}
