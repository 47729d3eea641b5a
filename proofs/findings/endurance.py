"""Sections of what lasts: memory over thousands of requests of each kind, a wall clock that jumps, descriptors that run
out. A real `quire serve` of a small model in all of them.

Memory is looked at when nothing is under way: of the server's own process, of its worker, and of the largest of its
helpers. Before anything is counted the pool has been touched and what is kept within bounds has been filled.
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
MOST_TURNS = 3
MOST_GROWTH, MOST_GROWTH_BYTES = 0.02, 4 * MIB
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
    while not all(one["state"] == "ready" for one in server.admin("/stats")["models"]):
        if server.has_ended or time.monotonic() > deadline_s:
            raise RuntimeError("\n".join(server.lines[-20:]))
        time.sleep(0.1)


# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Client:
    """One of those that send at once, over connections that are kept."""

    session: aiohttp.ClientSession
    url: str
    dice: Random
    past: list[str] = field(default_factory=list)
    """Responses of a conversation that the server keeps; it is left before the model's context is full."""

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """The status, and all that came."""
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.read()

    def text(self, most: int = 12) -> str:
        return phrase(self.dice, most)

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
    return (await client.post("/v1/chat/completions", client.chat(tools=[_tool(number)], stream=number % 2 == 0)))[
        0
    ] == 200


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


async def _many(client: Client, _number: int) -> bool:
    body = {"model": "m", "prompt": client.text(), "max_tokens": 6, "n": 4, "logprobs": 3, "stop": ["e", "xyz"]}
    return (await client.post("/v1/completions", body))[0] == 200


async def _stored(client: Client, _number: int) -> bool:
    body = {"model": "m", "input": client.text(), "max_output_tokens": 4, "store": True}
    if client.past:
        body["previous_response_id"] = client.past[-1]
    status, data = await client.post("/v1/responses", body)
    client.past = [*client.past, json.loads(data)["id"]] if status == 200 and len(client.past) < MOST_TURNS else []
    return status == 200


async def _message(client: Client, number: int) -> bool:
    body = {**client.chat(stream=number % 2 == 0), "system": client.text()}
    return (await client.post("/v1/messages", body))[0] == 200


async def _leaving(client: Client, _number: int) -> bool:
    """Goes when the first bytes are there; the connection with it."""
    body = client.chat(stream=True, max_tokens=200)
    async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as response:
        await response.content.readany()
        response.close()
        return response.status == 200


async def _explained(client: Client, number: int) -> bool:
    path = ("/v1/cache/explain", "/tokenize")[number % 2]
    body = {"model": "m", "prompt": client.text(40)}
    return (await client.post(path, body))[0] == 200


async def _refused(client: Client, number: int) -> bool:
    bodies: tuple[dict[str, Any], ...] = (
        client.chat(max_tokens=100_000), client.chat(grammar="start: ("), {"model": f"m{number}", "messages": []},
        client.chat(temperature=f"{number}"),
    )  # fmt: skip
    return (await client.post("/v1/chat/completions", bodies[number % 4]))[0] in (400, 404)


KINDS: Mapping[str, Send] = {
    "completion": _completion, "chat": _chat, "tools": _tools, "lark": _lark, "schema": _schema, "choice": _choice,
    "many": _many, "stored": _stored, "message": _message, "leaving": _leaving, "explained": _explained,
    "refused": _refused,
}  # fmt: skip
WITH_GRAMMARS = ("tools", "lark", "schema", "choice")


async def _send_all(server: Server, dice: Random, send: Send, numbers: Sequence[int]) -> int:
    """So many requests by as many clients; returns how many were not answered as they must be."""
    left, failed = iter(numbers), 0

    async def go_on(client: Client) -> None:
        nonlocal failed
        for number in left:
            if not await send(client, number):
                failed += 1
                say(f"    {send.__name__} {number}: not answered as it must be")

    async with _clients(server, dice, NUM_CLIENTS) as clients:
        await asyncio.gather(*(go_on(one) for one in clients))
    return failed


# -- leaks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """By a server at rest."""

    parent: int
    worker: int
    helper: int
    """The largest of them, in bytes like the others."""
    num_descriptors: int

    def growth_since(self, before: "Held") -> dict[str, int]:
        """Bytes beyond what each may have grown by; none is no entry."""
        found = {}
        for role in ("parent", "worker", "helper"):
            was, now = getattr(before, role), getattr(self, role)
            if now - was > max(MOST_GROWTH * was, MOST_GROWTH_BYTES):
                found[role] = now - was
        return found


def _held(server: Server) -> Held:
    """When its clients are gone: their connections are closed a moment later."""
    pids = children_of(server.pid)
    workers = [pid for pid in pids if "quire.worker" in _command(pid)]
    helpers = [_resident(pid) for pid in pids if pid not in workers]
    return Held(
        _resident(server.pid), sum(map(_resident, workers)), max(helpers, default=0), _settled_descriptors(server)
    )


def _settled_descriptors(server: Server) -> int:
    """The least that is seen while clients' connections are being closed."""
    least, since_s = server.num_descriptors(), time.monotonic()
    while time.monotonic() - since_s < 0.5:
        time.sleep(0.1)
        if (now := server.num_descriptors()) < least:
            least, since_s = now, time.monotonic()
    return least


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    return ""


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _fill(server: Server, dice: Random, num_grammars: int) -> int:
    """Touch the pool, and fill what is kept of grammars, conversations, prompts and 10,000 requests."""
    failed = 0
    for name, send in KINDS.items():
        count = num_grammars if name in WITH_GRAMMARS else num_grammars * 3 // 4
        failed += asyncio.run(_send_all(server, dice, send, range(count)))
    return failed


@section("endurance: leaks")
def leaks(proof: Proof) -> None:
    """Each kind, looked at after its second tenth and after its last; grammars are drawn from more than are kept."""
    dice, count = proof.random, proof.sized(quick=200, full=3_000)
    num_grammars = proof.sized(quick=100, full=1_200)
    num_grown = num_open = worst = 0
    with _serving(proof, "--store", str(proof.folder / "kept.db"), "--store-size", "1MiB") as server:
        failed = _fill(server, dice, num_grammars)
        for name, send in KINDS.items():
            numbers = itertools.cycle(range(num_grammars))
            held: list[Held] = []
            for num_parts in (2, NUM_PARTS - 2):
                chosen = list(itertools.islice(numbers, num_parts * count // NUM_PARTS))
                failed += asyncio.run(_send_all(server, dice, send, chosen))
                held.append(_held(server))
            second, last = held
            grown = last.growth_since(second)
            num_grown += len(grown)
            num_open += max(0, last.num_descriptors - second.num_descriptors)
            worst = max(
                worst, *(getattr(last, role) - getattr(second, role) for role in ("parent", "worker", "helper"))
            )
            say(f"    {name}: {_shown(second)} then {_shown(last)} {grown or ''}")
        restarts = server.num_restarts()
    proof.report("leaks_requests", count * len(KINDS))
    proof.report("leaks_worst_mb", round(worst / MIB, 2))
    proof.equals("leaks_failed", failed + restarts, 0, "requests not answered as they must be, and workers lost")
    proof.equals("leaks", num_grown, 0, f"processes that grew by more than 2% and {MOST_GROWTH_BYTES // MIB} MiB")
    proof.equals("leaks_descriptors", num_open, 0, "open beyond those of the second tenth")


def _shown(held: Held) -> str:
    return f"{held.parent / MIB:.1f}/{held.worker / MIB:.1f}/{held.helper / MIB:.1f} MiB, {held.num_descriptors} open;"


# -- the wall clock ----------------------------------------------------------------------------------------------------


@section("endurance: the wall clock jumps")
def clock(proof: Proof) -> None:
    """By an hour and a day, forwards and backwards, under requests of all kinds; the monotonic clock goes on."""
    dice, count = proof.random, proof.sized(quick=8, full=50)
    library, moved = proof.folder / "moved_clock.so", proof.folder / "moved-by"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, MOVED_CLOCK, "-ldl"], check=True)
    moved.write_bytes(struct.pack("q", 0))
    environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK_FILE": str(moved)}
    with _serving(proof, "--store", str(proof.folder / "clock.db"), environment=environment) as server:
        seen, failed, num_sent = 0, 0, 0
        for number in range(count):
            came = asyncio.run(_jump(server, dice, moved, JUMPS_S[number % len(JUMPS_S)]))
            num_sent, failed, seen = num_sent + came.num_sent, failed + came.num_failed, seen + came.is_seen
        is_normal = _is_normal(server)
        restarts = server.num_restarts()
    proof.report("clock_requests", num_sent)
    proof.equals("clock_jumps_seen", seen, count, "by the server: `created` of an answer moves as the clock does")
    proof.equals("clock_jumps", failed, 0, "requests that failed")
    proof.equals("clock_workers_lost", restarts, 0)
    proof.holds("clock_back_to_normal", is_normal, "always")


@dataclass(frozen=True, slots=True)
class Jump:
    """What came of one."""

    num_sent: int
    num_failed: int
    is_seen: bool


async def _jump(server: Server, dice: Random, moved: Path, by_s: int) -> Jump:
    """In the middle of requests, and back again in the middle of others."""
    kinds = [send for name, send in KINDS.items() if name != "leaving"]
    async with _clients(server, dice, len(kinds)) as clients:
        before_s = await _created(clients[0])
        under_way = [asyncio.ensure_future(kinds[at % len(kinds)](one, at)) for at, one in enumerate(clients)]
        await asyncio.sleep(0.02)
        _move(moved, by_s)
        done = await asyncio.gather(*under_way)
        after_s = await _created(clients[0])
        more = [asyncio.ensure_future(kinds[at % len(kinds)](one, at)) for at, one in enumerate(clients)]
        await asyncio.sleep(0.02)
        _move(moved, 0)
        done += await asyncio.gather(*more)
    is_seen = abs(after_s - before_s - by_s) < 600
    return Jump(len(done), done.count(False), is_seen)


def _move(moved: Path, by_s: int) -> None:
    """In place: the server has mapped the file."""
    with moved.open("r+b") as file:
        file.write(struct.pack("q", by_s))


async def _created(client: Client) -> int:
    _, data = await client.post("/v1/chat/completions", client.chat())
    return int(json.loads(data)["created"])


def _is_normal(server: Server) -> bool:
    """Ready, and every kind is answered."""

    async def each() -> list[int]:
        return [await _send_all(server, Random(1), send, range(4)) for send in KINDS.values()]

    ready = all(one["state"] == "ready" for one in server.admin("/stats")["models"])
    return ready and not any(asyncio.run(each()))


# -- descriptors -------------------------------------------------------------------------------------------------------


@section("endurance: descriptors run out")
def descriptors(proof: Proof) -> None:
    """64 are left to a server that runs, or to one that starts; more clients than that come at once, each anew."""
    dice, rounds, at_once = proof.random, proof.sized(quick=3, full=12), proof.sized(quick=200, full=400)
    failed = num_refused = num_sent = 0
    is_normal = True
    with _serving(proof, "--store", str(proof.folder / "few.db")) as server:
        asyncio.run(_flood(server, dice, 16))  # helpers are there, as on a server that is in use
        for number in range(rounds):
            limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in server.pids()}
            for pid, (_, most) in limits.items():
                left = len(list(Path(f"/proc/{pid}/fd").iterdir())) + FEW_DESCRIPTORS
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (left, most))
            statuses = asyncio.run(_flood(server, dice, at_once))
            for pid, both in limits.items():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, both)
            num_sent += len(statuses)
            num_refused += statuses.count(REFUSED)
            wrong = [one for one in statuses if one not in (200, REFUSED)]
            failed += len(wrong)
            if wrong:
                say(f"    round {number}: {len(wrong)} of {len(statuses)} failed: {sorted(set(map(str, wrong)))[:5]}")
            is_normal = is_normal and _is_normal(server)
        restarts = server.num_restarts()
    proof.report("fd_requests", num_sent)
    proof.report("fd_refused", num_refused, "with 503")
    proof.equals("fd_exhaustion", failed, 0, "requests that failed beyond those")
    proof.equals("fd_workers_lost", restarts, 0)
    proof.holds("fd_back_to_normal", is_normal, "always")


async def _flood(server: Server, dice: Random, at_once: int) -> list[int | str]:
    """All at once, each over a connection of its own; the statuses, or how it failed."""

    async def one(number: int) -> int | str:
        client = Client(session, server.url, Random(dice.getrandbits(64)))
        path, body = _flooding(client, number)
        try:
            return (await client.post(path, body))[0]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return type(error).__name__

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        return await asyncio.gather(*(one(number) for number in range(at_once)))


def _flooding(client: Client, number: int) -> tuple[str, dict[str, Any]]:
    """Each of these opens something beside its connection, or may: helpers, the store."""
    match number % 4:
        case 0:
            return "/v1/chat/completions", client.chat(max_tokens=64, stream=True)
        case 1:
            return "/v1/responses", {"model": "m", "input": client.text(), "max_output_tokens": 16, "store": True}
        case 2:
            return "/v1/chat/completions", client.chat(grammar=f'start: "b"+ "{number}"')
        case _:
            return "/v1/completions", {"model": "m", "prompt": client.text(40), "max_tokens": 32}
