"""Shared by the proofs of the server: a server as a process, a watch on its network connections, and HTTP clients."""

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
"""An environment variable that a server and all of its children inherit, so that all of them can be found."""
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
WORDS = [
    "river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "quiet", "harbour", "second",
    "orange", "window", "seven", "paper",
]  # fmt: skip
LOOPBACK = re.compile(r"0100007F:|00000000000000000000000001000000:|0000000000000000FFFF00000100007F:")


def phrase(dice: Random, max_words: int = 12) -> str:
    """A phrase of random words."""
    return " ".join(dice.choices(WORDS, k=dice.randint(1, max_words)))


def serve_words(*more: str) -> tuple[str, ...]:
    """Arguments of `quire serve` for the test model, which gets the name `m`."""
    return (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB", "--max-model-len", "1024", *more)


@dataclass
class Server(live_server.Server):
    """A server process; it and all of its children carry a mark in their environment."""

    mark: str = ""

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{") and '"quire.access"' in line]

    def pids(self) -> list[int]:
        """The process ids of the server and its workers."""
        return [self.pid, *children_of(self.pid)]

    def num_descriptors(self) -> int:
        """Open file descriptors of the server and its workers."""
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids())

    def resident_bytes(self) -> int:
        """Resident memory of the server and its workers."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE")

    def num_restarts(self) -> int:
        """The number of workers that were replaced, by the admin statistics."""
        return sum(int(model["engine"]["num_restarts"]) for model in self.admin("/stats")["models"])

    def remaining_processes(self, within_s: float = 2.0) -> list[int]:
        """Processes of the server that still run after `within_s` seconds."""
        deadline_s = time.monotonic() + within_s
        while (remaining := processes_with_mark(self.mark)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return remaining


@contextmanager
def started(
    folder: Path,
    *words: str,
    module: str = "tests.support.servers.oracle_server",
    before: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    is_awaited: bool = True,
) -> Iterator[Server]:
    """Run a server with these arguments; if `is_awaited` is off, the port is chosen here, and nothing waits for it."""
    run = folder / f"run-{time.monotonic_ns()}"
    admin, port = run / "admin.sock", 0 if is_awaited else free_port()
    server_options = ["--port", str(port), "--admin-socket", str(admin), "--log-format", "json"]
    command = [*before, sys.executable, "-m", *module.split(), *words, *server_options]
    path = f"{Path(watched.__file__).parent}:{ROOT / 'src'}:{ROOT}"
    # The user who runs this may have API keys in the default folder: let the server look elsewhere.
    own_variables = {"XDG_CONFIG_HOME": str(run), "PYTHONPATH": path}
    variables = {**os.environ, **(environment or {}), **own_variables, MARK: run.name, WATCH_SOCKETS: OUTBOUND.folder}
    with spawned(command, folder / f"{run.name}.log", variables, stops_s=0) as process:
        server = Server(process.process, process.log, admin, port, mark=run.name)
        with OUTBOUND.watching(server, has_worker=is_awaited):
            if is_awaited:
                server.port = int(server.wait_for(LISTENING, 300.0))
            yield server


def children_of(pid: int) -> list[int]:
    """Running child processes of a process."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            pids += [int(word) for word in path.read_text().split()]
    return pids


def processes_with_mark(mark: str) -> list[int]:
    """Processes that carry this mark; zombies have no environment and are not among them."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


class Outbound:
    """Records the addresses that servers and their workers connect to, from the start of each process.

    An audit hook in each interpreter writes every connection to a file. Native libraries bypass this hook: for them the
    kernel's socket tables are polled.
    """

    def __init__(self) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="quire-watch-")
        self.folder = self._holder.name
        self.num_expected = self.num_polls = 0
        self._seen: set[str] = set()

    @contextmanager
    def watching(self, server: Server, *, has_worker: bool) -> Iterator[None]:
        """Poll while the block runs. A server that is ended while it loads may not have started a worker."""
        self.num_expected += 1 + has_worker
        stop = threading.Event()
        thread = threading.Thread(target=self._poll, args=(server, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _poll(self, server: Server, stop: threading.Event) -> None:
        while not stop.wait(0.25):
            for pid in server.pids():
                with suppress(OSError):
                    self._seen |= {
                        remote for state, _, remote in sockets(pid) if state != "0A" and not LOOPBACK.match(remote)
                    }
                    self.num_polls += 1

    @property
    def num_processes(self) -> int:
        """The number of processes whose audit hook has written a file."""
        return len(list(Path(self.folder).iterdir()))

    def recorded_events(self, *names: str) -> list[str]:
        """Recorded events of these names with an address beyond this machine."""
        lines = [line for path in Path(self.folder).iterdir() for line in path.read_text().splitlines()]
        parts = [line.partition(" ") for line in lines]
        return [f"{event} {host}" for event, _, host in parts if event in names and not is_local(host)]

    def remote_connections(self) -> list[str]:
        """All recorded connections beyond this machine."""
        names = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
        return [*self.recorded_events(*names), *sorted(self._seen)]

    def detects_connections(self) -> bool:
        """A control: whether a connection to another machine is recorded. Connected datagram sockets send nothing."""
        with tempfile.TemporaryDirectory() as folder:
            code = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
            variables = {**os.environ, "PYTHONPATH": str(Path(watched.__file__).parent), WATCH_SOCKETS: folder}
            subprocess.run([sys.executable, "-c", code], env=variables, stderr=subprocess.DEVNULL)
            return any("192.0.2.1" in path.read_text() for path in Path(folder).iterdir())


def is_local(host: str) -> bool:
    """Whether a recorded address is on this machine: loopback, a path, or empty."""
    bare = host.strip("b'\"")
    return bare in ("", "None", "localhost") or bare.startswith(("127.", "/", "\\x00", "::1"))


OUTBOUND = Outbound()


def sockets(pid: int) -> list[tuple[str, str, str]]:
    """State, local address and remote address of every TCP socket of a process."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = row.split()
            if f"socket:[{parts[9]}]" in inodes:
                rows.append((parts[3], parts[1], parts[2]))
    return rows


def listeners(pid: int) -> list[str]:
    return [local for state, local, _ in sockets(pid) if state == "0A"]


@dataclass
class Streamed:
    """What a client has read of a streamed completion."""

    status: int = 0
    pieces: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    tail: bytes = b""
    num_tokens: int | None = None
    """The number of output tokens by the usage."""
    errors: list[str] = field(default_factory=list)
    """Codes of the errors in the stream."""
    has_retry: bool = False

    def is_whole(self, num_tokens: int) -> bool:
        """Whether the stream has status 200, no error, all of its tokens and its end."""
        return self.status == 200 and not self.errors and self.num_tokens == num_tokens and self.is_ended

    @property
    def is_ended(self) -> bool:
        return self.tail.strip() == b"data: [DONE]"

    def take(self, line: bytes) -> None:
        """Read the next line of the stream."""
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
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], streamed: Streamed | None = None
) -> Streamed:
    """Read a streamed completion line by line; into `streamed`, for a caller that may cancel it."""
    streamed = streamed or Streamed()
    async with session.post(f"{url}/v1/completions", json=_as_stream(body)) as response:
        streamed.status, streamed.has_retry = response.status, "retry-after" in response.headers
        async for line in response.content:
            streamed.take(line)
    return streamed


def stream_bytes(port: int, bodies: list[dict[str, Any]], path: str = "/v1/completions") -> list[bytes]:
    """Send all requests at once, and only collect the bytes of their streams, which costs the client little.

    `parse_stream` parses them later.
    """
    received: dict[socket.socket, list[bytes]] = {}
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((HOST, port))
            data = json.dumps(_as_stream(body)).encode()
            headers = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            headers += f"content-length: {len(data)}\r\n\r\n"
            connection.sendall(headers.encode() + data)
            received[connection] = []
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj  # type: ignore[assignment]
                if part := connection.recv(1 << 16):
                    received[connection].append(part)
                else:
                    selector.unregister(connection)
                    connection.close()
    return [b"".join(parts) for parts in received.values()]


@dataclass(frozen=True, slots=True)
class Streams:
    """A load of concurrent streams, each with the same number of tokens."""

    count: int
    num_tokens: int

    def tokens_per_s(self, port: int, model: str, number: int) -> float:
        """Tokens per second of all streams together; `number` makes the prompts new."""
        fields = {"model": model, "max_tokens": self.num_tokens, "ignore_eos": True}
        bodies = [{**fields, "prompt": f"{number} {index} begins", "seed": index} for index in range(self.count)]
        start_s = time.perf_counter()
        responses = stream_bytes(port, bodies)
        elapsed_s = time.perf_counter() - start_s
        if failed_statuses := [stream.status for stream in map(parse_stream, responses) if stream.status != 200]:
            raise RuntimeError(f"{len(failed_statuses)} of {self.count} streams failed, with {failed_statuses[0]}")
        return self.count * self.num_tokens / elapsed_s


def parse_stream(data: bytes) -> Streamed:
    """Parse the bytes of a chunked response."""
    status, body = decode_chunks(data)
    streamed = Streamed(status)
    for line in body.splitlines():
        streamed.take(line)
    return streamed


def decode_chunks(data: bytes) -> tuple[int, bytes]:
    """The status of a chunked response, and its body without the chunks' frames."""
    head, _, body = data.partition(b"\r\n\r\n")
    parts = []
    while body:
        size, _, remaining = body.partition(b"\r\n")
        parts.append(remaining[: int(size, 16)])
        body = remaining[int(size, 16) + 2 :]
    return int(head.split(b" ", 2)[1]), b"".join(parts)


def _as_stream(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    has_retry: bool
    body: bytes


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._received = b""
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
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank or self._answer is None or self._answer.done():
            return
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        if len(body) >= int(length[1]):
            self._received = b""
            self._answer.set_result(Answer(int(head[9:12]), b"retry-after:" in head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"a connection was lost before its answer: {exc}"))


class Connections:
    """A pool of connections to one server: a client that needs little processor time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []

    async def ask(self, body: dict[str, Any]) -> Answer:
        """The reply to a completion request."""
        connection = self._idle.pop() if self._idle else await self._new()
        data = json.dumps(body).encode()
        answer = await connection.ask(COMPLETION % len(data) + data)
        self._idle.append(connection)
        return answer

    async def _new(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, HOST, self._port)
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            assert connection.transport is not None
            connection.transport.close()


def connect_slowly(port: int, body: dict[str, Any]) -> socket.socket:
    """Send a streamed request on a connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((HOST, port))
    data = json.dumps({**body, "stream": True}).encode()
    connection.sendall(COMPLETION % len(data) + data)
    return connection


async def disconnect_early(port: int, body: dict[str, Any], moment: str, with_reset: bool) -> float:
    """Send a request and disconnect: at once, after the headers, or after some text. Returns the monotonic time."""
    reader, writer = await asyncio.open_connection(HOST, port)
    data = json.dumps(body).encode()
    head = COMPLETION % len(data)
    writer.write(head + (data[:10] if moment == "half a body" else data))
    await writer.drain()
    if moment in ("headers", "some text"):
        with suppress(ConnectionError):
            await reader.read(100 if moment == "headers" else 4000)
    disconnected_s = time.monotonic()
    if with_reset:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return disconnected_s


def percentile(values: list[float], share: float) -> float:
    sorted_values = sorted(values)
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]
