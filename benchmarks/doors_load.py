"""What the proof of the doors shares: a server as a process, its line of sight into /proc, and clients that load it."""

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.proof import ROOT

LOOPBACK = re.compile(r"0100007F:|00000000000000000000000001000000:|0000000000000000FFFF00000100007F:")


@dataclass
class Server:
    """A process that serves, and everything it has said."""

    process: "subprocess.Popen[str]"
    admin_path: Path
    lines: list[str] = field(default_factory=list)
    port: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> None:
        """Everything it says, until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"listening on http://.*:(\d+),", line):
                self.port = int(found[1])
                self.ready.set()
        self.ended.set()
        self.ready.set()

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{") and '"quire.access"' in line]

    def stop(self, within_s: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within_s)
        self.ended.wait(10)
        return code

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def admin(self, path: str) -> Any:
        """Ask on the operator's socket."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(10)
            wire.connect(str(self.admin_path))
            wire.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            data = b""
            while part := wire.recv(65536):
                data += part
        return json.loads(data.partition(b"\r\n\r\n")[2])


@contextmanager
def started(
    folder: Path, *words: str, module: str = "tests.support.oracle_server", before: tuple[str, ...] = ()
) -> Iterator[Server]:
    """A server with these words on its command line."""
    run = folder / f"run-{time.monotonic_ns()}"
    admin = run / "admin.sock"
    own = ["--port", "0", "--admin-socket", str(admin), "--log-format", "json"]
    if "--keys-file" not in words:
        own += ["--keys-file", str(run / "no-keys.json")]
    command = [*before, sys.executable, "-m", *module.split(), *words, *own]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    server = Server(process, admin)
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        server.ready.wait(300)
        if not server.port:
            raise RuntimeError("\n".join(server.lines[-20:]))
        with OUTBOUND.watching(server.pid):
            yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)


class Outbound:
    """Looks again and again whether a server talks to anybody beyond this machine."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.num_looks = 0

    @contextmanager
    def watching(self, pid: int) -> Iterator[None]:
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=(pid, over), daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    def _look(self, pid: int, over: threading.Event) -> None:
        while not over.wait(0.5):
            with suppress(OSError):
                self.seen |= {
                    remote for state, _, remote in sockets(pid) if state != "0A" and not LOOPBACK.match(remote)
                }
                self.num_looks += 1


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


async def stream_text(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, list[float], bytes]:
    """A streamed completion's text, the moments its events came, and its last bytes."""
    text, moments, tail = [], [], b""
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
                event = json.loads(line[6:])
                text += [choice["text"] for choice in event.get("choices", ())]
            if line.strip():
                tail = line
    return "".join(text), moments, tail


def slow_wire(port: int, body: dict[str, Any]) -> socket.socket:
    """Asks, and has room for very little of the answer."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", port))
    data = json.dumps({**body, "stream": True}).encode()
    wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return wire


async def leave(port: int, body: dict[str, Any], after: str, with_reset: bool) -> None:
    """Ask and go away: at once, when headers come, or after some of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    writer.write(head + (data[:10] if after == "half a body" else data))
    await writer.drain()
    if after in ("headers", "some text"):
        with suppress(ConnectionError):
            await reader.read(100 if after == "headers" else 4000)
    if with_reset:
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
