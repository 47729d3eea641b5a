"""What the proof of the server shares: a server as a process, what it and its worker do, and clients that load it."""

import asyncio
import json
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import aiohttp

from benchmarks.record import ROOT
from benchmarks.servers import HOST, free_port
from benchmarks.test_model import smollm2_directory
from tests.support import watched
from tests.support.machine.spawned import LISTENING, spawned
from tests.support.servers import live_server
from tests.support.watched.sitecustomize import FOLDER as WATCH_SOCKETS

MARK = "PROOF_MARK"
"""In the environment of a server and all its children, so that none of them can hide."""
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
WORDS = [
    "river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "quiet", "harbour", "second",
    "orange", "window", "seven", "paper",
]  # fmt: skip
LOOPBACK = re.compile(r"0100007F:|00000000000000000000000001000000:|0000000000000000FFFF00000100007F:")


def phrase(dice: Random, most: int = 12) -> str:
    """Some words."""
    return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))


def serve_words(*more: str) -> tuple[str, ...]:
    """What `quire serve` is given for the test model, which is called `m`."""
    return (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB", "--max-model-len", "1024", *more)


@dataclass
class Server(live_server.Server):
    """A process that serves, all of whose children carry a mark."""

    mark: str = ""

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{") and '"quire.access"' in line]

    def pids(self) -> list[int]:
        """It and its workers."""
        return [self.pid, *children_of(self.pid)]

    def num_descriptors(self) -> int:
        """Of it and its workers."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids())

    def resident_bytes(self) -> int:
        """Of it and its workers."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE")

    def num_restarts(self) -> int:
        """Workers that were replaced, as the operator is told."""
        return sum(int(model["engine"]["num_restarts"]) for model in self.admin("/stats")["models"])

    def left_behind(self, within_s: float = 2.0) -> list[int]:
        """Processes of it that are still there, once they had time to go."""
        deadline_s = time.monotonic() + within_s
        while (left := marked(self.mark)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left


@contextmanager
def started(
    folder: Path,
    *words: str,
    module: str = "tests.support.servers.oracle_server",
    before: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    is_awaited: bool = True,
) -> Iterator[Server]:
    """A server with these words on its command line; one that is not waited for is at a port of its own choice."""
    run = folder / f"run-{time.monotonic_ns()}"
    admin, port = run / "admin.sock", 0 if is_awaited else free_port()
    own = ["--port", str(port), "--admin-socket", str(admin), "--log-format", "json"]
    command = [*before, sys.executable, "-m", *module.split(), *words, *own]
    path = f"{Path(watched.__file__).parent}:{ROOT / 'src'}:{ROOT}"
    # Whoever runs this may have keys of their own where the server looks for them: let it look elsewhere.
    own_places = {"XDG_CONFIG_HOME": str(run), "PYTHONPATH": path}
    around = {**os.environ, **(environment or {}), **own_places, MARK: run.name, WATCH_SOCKETS: OUTBOUND.folder}
    with spawned(command, folder / f"{run.name}.log", around, stops_s=0) as one:
        server = Server(one.process, one.log, admin, port, mark=run.name)
        with OUTBOUND.watching(server, has_worker=is_awaited):
            if is_awaited:
                server.port = int(server.wait_for(LISTENING, 300.0))
            yield server


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that are still there."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(one) for one in path.read_text().split()]
    return found


def marked(mark: str) -> list[int]:
    """Processes that carry this mark, but for those that only wait to be buried."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Outbound:
    """Whom servers and their workers talk to, from their first line on.

    Their interpreters tell of every connection themselves. Libraries that are not Python do not go through those: for
    them the kernel's tables are looked at again and again.
    """

    def __init__(self) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="quire-watch-")
        self.folder = self._holder.name
        self.num_expected = self.num_looks = 0
        self._seen: set[str] = set()

    @contextmanager
    def watching(self, server: Server, *, has_worker: bool) -> Iterator[None]:
        """As long as it runs. One that is ended while it loads may not have come as far as a worker."""
        self.num_expected += 1 + has_worker
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=(server, over), daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    def _look(self, server: Server, over: threading.Event) -> None:
        while not over.wait(0.25):
            for pid in server.pids():
                with suppress(OSError):
                    self._seen |= {
                        remote for state, _, remote in sockets(pid) if state != "0A" and not LOOPBACK.match(remote)
                    }
                    self.num_looks += 1

    @property
    def num_processes(self) -> int:
        """That told of themselves."""
        return len(list(Path(self.folder).iterdir()))

    def told(self, *events: str) -> list[str]:
        """Addresses beyond this machine that were told of."""
        lines = [line for path in Path(self.folder).iterdir() for line in path.read_text().splitlines()]
        told = [line.partition(" ") for line in lines]
        return [f"{event} {host}" for event, _, host in told if event in events and not is_here(host)]

    def beyond(self) -> list[str]:
        """Everybody elsewhere."""
        names = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
        return [*self.told(*names), *sorted(self._seen)]

    def sees(self) -> bool:
        """Whether somebody who talks to elsewhere would be seen: a datagram socket that is connected sends nothing."""
        with tempfile.TemporaryDirectory() as folder:
            code = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
            around = {**os.environ, "PYTHONPATH": str(Path(watched.__file__).parent), WATCH_SOCKETS: folder}
            subprocess.run([sys.executable, "-c", code], env=around, stderr=subprocess.DEVNULL)
            return any("192.0.2.1" in path.read_text() for path in Path(folder).iterdir())


def is_here(host: str) -> bool:
    """Whether an address, as it was told, is this machine's: loopback, a path, nothing."""
    bare = host.strip("b'\"")
    return bare in ("", "None", "localhost") or bare.startswith(("127.", "/", "\\x00", "::1"))


OUTBOUND = Outbound()


def sockets(pid: int) -> list[tuple[str, str, str]]:
    """State, own and other address of every TCP socket of a process."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = row.split()
            if f"socket:[{parts[9]}]" in own:
                found.append((parts[3], parts[1], parts[2]))
    return found


def listeners(pid: int) -> list[str]:
    return [local for state, local, _ in sockets(pid) if state == "0A"]


@dataclass
class Streamed:
    """A stream from its first byte to its last."""

    status: int = 0
    pieces: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    tail: bytes = b""
    num_tokens: int | None = None
    """As its usage says."""
    errors: list[str] = field(default_factory=list)
    """Codes of errors it was told on the way."""
    has_retry: bool = False

    def is_whole(self, num_tokens: int) -> bool:
        """It was answered, told of no error, has all its tokens and said that it was over."""
        return self.status == 200 and not self.errors and self.num_tokens == num_tokens and self.is_ended

    @property
    def is_ended(self) -> bool:
        return self.tail.strip() == b"data: [DONE]"

    def take(self, line: bytes) -> None:
        """The next line of it."""
        if line.startswith((b"data: {", b"{")):
            self.moments.append(time.perf_counter())
            event = json.loads(line.removeprefix(b"data: "))
            self.pieces += [choice["text"] for choice in event.get("choices", ())]
            if event.get("usage"):
                self.num_tokens = event["usage"]["completion_tokens"]
            if "error" in event:
                self.errors.append(str(event["error"]["code"]))
        if line.strip():
            self.tail = line


async def stream_text(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], told: Streamed | None = None
) -> Streamed:
    """A streamed completion, with its usage, read line by line as it comes; into `told`, for who may break it off."""
    told = told or Streamed()
    async with session.post(f"{url}/v1/completions", json=_streamed(body)) as response:
        told.status, told.has_retry = response.status, "retry-after" in response.headers
        async for line in response.content:
            told.take(line)
    return told


def stream_bytes(port: int, bodies: list[dict[str, Any]], path: str = "/v1/completions") -> list[bytes]:
    """All at once, and only taken from their sockets until these are closed: reading that costs as little as it can.

    `read_later` reads what came.
    """
    came: dict[socket.socket, list[bytes]] = {}
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            wire = socket.create_connection((HOST, port))
            data = json.dumps(_streamed(body)).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += f"content-length: {len(data)}\r\n\r\n"
            wire.sendall(head.encode() + data)
            came[wire] = []
            selector.register(wire, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                wire = key.fileobj  # type: ignore[assignment]
                if part := wire.recv(1 << 16):
                    came[wire].append(part)
                else:
                    selector.unregister(wire)
                    wire.close()
    return [b"".join(parts) for parts in came.values()]


@dataclass(frozen=True, slots=True)
class Streams:
    """So many at once, each with so many tokens."""

    count: int
    num_tokens: int

    def tokens_per_s(self, port: int, model: str, number: int) -> float:
        """Of all together, with prompts that the number makes new."""
        rest = {"model": model, "max_tokens": self.num_tokens, "ignore_eos": True}
        bodies = [{**rest, "prompt": f"{number} {at} begins", "seed": at} for at in range(self.count)]
        began_s = time.perf_counter()
        came = stream_bytes(port, bodies)
        taken_s = time.perf_counter() - began_s
        if wrong := [one.status for one in map(read_later, came) if one.status != 200]:
            raise RuntimeError(f"{len(wrong)} of {self.count} streams failed, with {wrong[0]}")
        return self.count * self.num_tokens / taken_s


def read_later(data: bytes) -> Streamed:
    """What the bytes of a response in chunks say."""
    status, body = unchunked(data)
    told = Streamed(status)
    for line in body.splitlines():
        told.take(line)
    return told


def unchunked(data: bytes) -> tuple[int, bytes]:
    """The status of a response, and its body out of its chunks."""
    head, _, body = data.partition(b"\r\n\r\n")
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return int(head.split(b" ", 2)[1]), b"".join(parts)


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    has_retry: bool
    body: bytes


class _Wire(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._came = b""
        self._answer: asyncio.Future[Answer] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # another loop's is no subclass of it

    def ask(self, data: bytes) -> "asyncio.Future[Answer]":
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, blank, body = self._came.partition(b"\r\n\r\n")
        if not blank or self._answer is None or self._answer.done():
            return
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        if len(body) >= int(length[1]):
            self._came = b""
            self._answer.set_result(Answer(int(head[9:12]), b"retry-after:" in head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"a connection was lost before its answer: {exc}"))


class Wires:
    """Connections to one server, as many as are in use at once: a client that costs little beside the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Wire] = []
        self._all: list[_Wire] = []

    async def ask(self, body: dict[str, Any]) -> Answer:
        """A completion, or what was said instead."""
        wire = self._idle.pop() if self._idle else await self._new()
        data = json.dumps(body).encode()
        answer = await wire.ask(COMPLETION % len(data) + data)
        self._idle.append(wire)
        return answer

    async def _new(self) -> _Wire:
        _, wire = await asyncio.get_running_loop().create_connection(_Wire, HOST, self._port)
        self._all.append(wire)
        return wire

    def close(self) -> None:
        for wire in self._all:
            assert wire.transport is not None
            wire.transport.close()


def slow_wire(port: int, body: dict[str, Any]) -> socket.socket:
    """Asks, and has room for very little of the answer."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect((HOST, port))
    data = json.dumps({**body, "stream": True}).encode()
    wire.sendall(COMPLETION % len(data) + data)
    return wire


async def leave(port: int, body: dict[str, Any], after: str, with_reset: bool) -> float:
    """Ask and go away: at once, when headers come, or after some of the answer; when, by the machine's clock."""
    reader, writer = await asyncio.open_connection(HOST, port)
    data = json.dumps(body).encode()
    head = COMPLETION % len(data)
    writer.write(head + (data[:10] if after == "half a body" else data))
    await writer.drain()
    if after in ("headers", "some text"):
        with suppress(ConnectionError):
            await reader.read(100 if after == "headers" else 4000)
    left_s = time.monotonic()
    if with_reset:
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return left_s


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
