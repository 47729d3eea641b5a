"""Starts servers on loopback (quire, the null server, peers), waits for an answer, and stops them by process id."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.record import ROOT, say
from quire.bench.http_client import Client, ModelCard
from quire.bench.runs import Bench, BenchOptions, RunListener
from quire.http_client import ServerAddress
from quire.worker.child.faults import FAULTS, SLOW, TESTING
from tests.support.machine.spawned import Spawned, spawned

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a server. `{port}` in its arguments becomes a free port."""

    words: Sequence[str]
    ready_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    client_options: BenchOptions = field(default_factory=BenchOptions)
    """Options of the benchmark client for this server."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers requests."""

    url: str
    card: ModelCard
    pid: int

    @property
    def server(self) -> ServerAddress:
        return ServerAddress.parse(self.url)


@contextmanager
def started(command: Command) -> Iterator[Running]:
    """Start a server and wait until it answers; stop it at the end. On an error, print the end of its output."""
    port = free_port()
    words = [word.format(port=port) for word in command.words]
    with spawned(words, None, {**plain_environment(), **command.environment}, is_leader=True) as server:
        try:
            card = asyncio.run(_ready(server, f"http://{HOST}:{port}", command))
            yield Running(f"http://{HOST}:{port}", card, server.pid)
        except BaseException:
            say(server.text[-3000:])
            raise


async def _ready(server: Spawned, url: str, command: Command) -> ModelCard:
    async with Client(ServerAddress.parse(url)) as client:
        # A server is ready when it answers a request: many already list models while they load them.
        opening = asyncio.ensure_future(
            Bench.open(client, replace(command.client_options, ready_s=command.ready_s), RunListener())
        )
        while not opening.done():
            await asyncio.wait((opening,), timeout=0.5)
            if server.has_ended and not opening.done():
                opening.cancel()
                raise RuntimeError(f"{server.process.args!r} ended with {server.process.returncode} before it answered")
        return opening.result().card


def plain_environment() -> dict[str, str]:
    """Return this environment without variables that tune servers, so that all are measured with their defaults."""
    tuning = ("GOMP_", "OMP_", "KMP_", "MKL_", "QUIRE_", "VLLM_", "ONEDNN_", "DNNL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(tuning)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def null_command(*, first_ms: float = 20.0, gap_ms: float = 5.0, slowdown: float = 1.0, phases: int = 1) -> Command:
    """Return the command of the null server, which has no model."""
    words = (sys.executable, "-m", "benchmarks.null_server", "--port", "{port}", "--first-ms", str(first_ms))
    return Command(
        (*words, "--gap-ms", str(gap_ms), "--slowdown", str(slowdown), "--phases", str(phases)), ready_s=20.0
    )


def quire_command(model: Path, *flags: str, memory: str = "8GiB", slowdown: float | None = None) -> Command:
    """Return the command of `quire serve` of this checkout.

    Speculation is off: a small model repeats itself after synthetic prompts, so drafts would be accepted more often
    than with real ones. `make proof-steps` measures speculation.
    With a slowdown every step takes so many times as long; 1 runs the same code without slowing anything.
    """
    options = ("--memory", memory, "--max-model-len", "2048", "--speculation", "off")
    words = (sys.executable, "-m", "quire", "serve", str(model), "--port", "{port}", *options, *flags)
    faults = {TESTING: "1", FAULTS: json.dumps([{"kind": SLOW, "by": slowdown}])} if slowdown is not None else {}
    return Command(words, ready_s=180.0, environment={"PYTHONPATH": str(ROOT / "src"), **faults})
