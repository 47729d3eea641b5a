"""Starts servers on loopback, waits until they answer, and stops them by their process id. Ours, null, or a peer's."""

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
    """What to start. `{port}` in a word becomes a free port."""

    words: Sequence[str]
    ready_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    wishes: BenchOptions = field(default_factory=BenchOptions)
    """How to ask it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    card: ModelCard
    pid: int

    @property
    def server(self) -> ServerAddress:
        return ServerAddress.parse(self.url)


@contextmanager
def started(command: Command) -> Iterator[Running]:
    """The server, ready; stopped at the end whatever happened. What it said is shown if it does not get ready."""
    port = free_port()
    words = [word.format(port=port) for word in command.words]
    with spawned(words, None, {**plain_environment(), **command.environment}, is_leader=True) as one:
        try:
            card = asyncio.run(_ready(one, f"http://{HOST}:{port}", command))
            yield Running(f"http://{HOST}:{port}", card, one.pid)
        except BaseException:
            say(one.text[-3000:])
            raise


async def _ready(server: Spawned, url: str, command: Command) -> ModelCard:
    async with Client(ServerAddress.parse(url)) as client:
        # Ready is who answers a request: many list their models while they load them.
        waiting = asyncio.ensure_future(
            Bench.open(client, replace(command.wishes, ready_s=command.ready_s), RunListener())
        )
        while not waiting.done():
            await asyncio.wait((waiting,), timeout=0.5)
            if server.has_ended and not waiting.done():
                waiting.cancel()
                raise RuntimeError(f"{server.process.args!r} ended with {server.process.returncode} before it answered")
        return waiting.result().card


def plain_environment() -> dict[str, str]:
    """Ours without what would tune one server, or all of them: each is measured as whoever installs it finds it."""
    tuning = ("GOMP_", "OMP_", "KMP_", "MKL_", "QUIRE_", "VLLM_", "ONEDNN_", "DNNL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(tuning)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def null_command(*, first_ms: float = 20.0, gap_ms: float = 5.0, slowdown: float = 1.0, phases: int = 1) -> Command:
    """A server that thinks nothing."""
    words = (sys.executable, "-m", "benchmarks.null_server", "--port", "{port}", "--first-ms", str(first_ms))
    return Command(
        (*words, "--gap-ms", str(gap_ms), "--slowdown", str(slowdown), "--phases", str(phases)), ready_s=20.0
    )


def quire_command(model: Path, *flags: str, memory: str = "8GiB", slowdown: float | None = None) -> Command:
    """`quire serve` of this checkout, with memory that is said.

    It does not guess tokens: prompts of loads are made up, a small model repeats itself after them, and guesses would
    look better than they are for anybody who asks something. What they are worth is `make proof-steps`'s to say.
    With a slowdown every step takes so many times as long; 1 slows nothing, but by the same code.
    """
    chosen = ("--memory", memory, "--max-model-len", "2048", "--speculation", "off")
    words = (sys.executable, "-m", "quire", "serve", str(model), "--port", "{port}", *chosen, *flags)
    slowed = {TESTING: "1", FAULTS: json.dumps([{"kind": SLOW, "by": slowdown}])} if slowdown is not None else {}
    return Command(words, ready_s=180.0, environment={"PYTHONPATH": str(ROOT / "src"), **slowed})
