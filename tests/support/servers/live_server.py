"""Servers as a user starts them: `quire serve` in a process of its own, asked over sockets.

The model is real and tiny, or an oracle in a real worker (`tests.support.servers.oracle_server`): then steps take as
long as they are told to, and a new worker is there in a second.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.support.machine.patience import PATIENCE_S
from tests.support.machine.spawned import LISTENING, Spawned, in_checkout, spawned
from tests.support.models.tiny_models import Tiny

TINY = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
SIZES = (
    "--memory",
    "1GiB",
    "--max-model-len",
    "512",
    "--max-running",
    "4",
    "--max-step-tokens",
    "64",
    "--threads",
    "1",
)


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        """Of a whole answer or a stream's chunks put together."""
        if not self.data.startswith(b"data: "):
            return str(self.json["choices"][0]["text"])
        events = [
            line.removeprefix("data: ")
            for line in self.data.decode().split("\n\n")
            if line and not line.startswith(":")  # a pause was filled
        ]
        assert events[-1] == "[DONE]", events[-2:]
        told = [json.loads(event) for event in events[:-1]]
        assert not [one for one in told if "error" in one], told[-1]
        return "".join(choice["text"] for one in told for choice in one["choices"])


@dataclass
class Server(Spawned):
    """One that runs."""

    admin_path: Path
    port: int
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None, name: str = "") -> Answer:
        """One request on a connection of its own; its name stands in the server's log."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
        headers |= {"x-request-id": name} if name else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
            return Answer(response.status, dict(response.getheaders()), data)
        finally:
            connection.close()

    def post(self, path: str, body: Any, key: str | None = None) -> Answer:
        return self.ask("POST", path, body, key)

    def later(self, path: str, body: Any, key: str | None = None, name: str = "") -> "Future[Answer]":
        """The same beside everything else."""
        return self.pool.submit(self.ask, "POST", path, body, key, name)

    @contextmanager
    def occupied(self, body: Any, key: str | None = None) -> Iterator[None]:
        """While a request runs that would take for ever; leaving ends it."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        try:
            until(lambda: "running" in self.states())
            yield
        finally:
            connection.close()

    def logged(self) -> list[str]:
        """The names of requests in the order in which they ended, as the server's own log has it."""
        return re.findall(r" client_id=(\S+)", "\n".join(self.lines))

    def complete(self, prompt: Any, key: str | None = None, **more: Any) -> Answer:
        told = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0, **more}, key)
        assert told.status == 200, told.data
        return told

    def states(self) -> list[str]:
        """Where those inside are, as the operator sees it."""
        return [one["state"] for one in self.admin("/requests")["requests"]]

    def admin(self, path: str) -> Any:
        """Ask on the operator's socket."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(PATIENCE_S)
            wire.connect(str(self.admin_path))
            wire.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            data = b"".join(iter(lambda: wire.recv(65536), b""))
        return json.loads(data.partition(b"\r\n\r\n")[2])

    def workers(self) -> list[int]:
        """Processes it has started that own a model; others render its templates."""
        children = [path.read_text().split() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")]
        return [int(one) for found in children for one in found if b"worker\0" in _command(one)]

    def signal_worker(self, number: int) -> None:
        (worker,) = self.workers()
        os.kill(worker, number)

    def stop(self, within_s: float = PATIENCE_S) -> int:
        """Ask it to end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition that must come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


@contextmanager
def running(folder: Path, *words: str, keys: Path | None = None) -> Iterator[Server]:
    """A server by this command, until the test is over."""
    admin = folder / "run" / "admin.sock"
    own = ["--port", "0", "--admin-socket", str(admin)]
    own += [] if keys is None else ["--keys-file", str(keys)]
    command, around = [sys.executable, "-m", *words, *own], in_checkout() | {"XDG_CONFIG_HOME": str(folder)}
    with spawned(command, folder / f"server-{time.monotonic_ns()}.log", around) as one:
        server = Server(one.process, one.log, admin, int(one.wait_for(LISTENING)))
        try:
            yield server
        finally:
            server.stop()
            server.pool.shutdown(wait=True)


def oracle(folder: Path, *words: str, keys: Path | None = None) -> Any:
    """A server whose model is an oracle."""
    return running(folder, "tests.support.servers.oracle_server", *words, keys=keys)
