"""Checks an environment with the wheel alone: its size, its imports, and a server's start time and memory.

The wheel is built from this commit and installed into an empty environment. The server is started from there, so that
it can use only the wheel's requirements.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from types import MappingProxyType

from benchmarks.record import say
from benchmarks.servers import HOST, free_port, plain_environment
from benchmarks.test_model import smollm2_file
from proofs.framework.environments import environment_with_wheel
from proofs.framework.proof import Proof, section
from tests.support.machine.spawned import Spawned, spawned

GIB, MB = 1 << 30, 1_000_000
READY_S = 120.0
IMPORTED = re.compile(r"^import time:.*\|\s*(torch(?:\.[\w.]+)?)\s*$", re.MULTILINE)
"""The line that Python writes for an import of torch with PYTHONPROFILEIMPORTTIME."""


@dataclass
class Served(Spawned):
    """A server that is ready."""

    port: int
    ready_s: float

    def complete(self, **options: object) -> dict[str, int]:
        """Return the usage of one short answer, which also loads lazily loaded modules."""
        connection = HTTPConnection(HOST, self.port, timeout=READY_S)
        body = json.dumps({"prompt": "One, two,", "max_tokens": 8, **options})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"expected status 200 of a completion, got {response.status}: {data[:300]!r}")
        usage: dict[str, int] = json.loads(data)["usage"]
        return usage


@contextmanager
def served(
    python: Path,
    folder: Path,
    *flags: str,
    model: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """Run `quire serve` with this interpreter and these environment variables."""
    port = free_port()
    command = [str(python), "-m", "quire", "serve", str(model or smollm2_file()), "--port", str(port), *flags]
    environment = {**plain_environment(), "PYTHONPATH": "", **variables}
    start_s = time.perf_counter()
    with spawned(command, folder / "serve.log", environment, folder=folder, is_leader=True) as process:
        yield Served(process.process, process.log, port, process.ready_at(port, READY_S) - start_s)


def bytes_in(folder: Path) -> int:
    """Return the bytes on disk, with hard links counted once."""
    files = {
        (path.stat().st_dev, path.stat().st_ino): path.stat().st_blocks * 512
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    return sum(files.values())


def held_bytes(leader: int) -> int:
    """Return the memory of a process and of all its descendants, including workers in their own sessions. Shared pages
    are counted once."""
    parents = {
        int(path.name): parent for path in Path("/proc").iterdir() if path.name.isdigit() if (parent := _parent(path))
    }
    family = {leader}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(_field_bytes(Path("/proc", str(pid), "smaps_rollup"), "Pss:") for pid in family)


def _parent(process: Path) -> int | None:
    """Return the id of the parent process; None if the process has ended."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _field_bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


@section("the wheel alone")
def alone(proof: Proof) -> None:
    """Size of the environment, imports of torch, start time with cached files, and memory of an idle server."""
    python = environment_with_wheel(proof.folder)
    proof.at_most("install_mb", bytes_in(python.parents[1]) / MB, 250, "pip included")
    # This interpreter has torch, so the server could import it.
    with served(Path(sys.executable), proof.folder, variables={"PYTHONPROFILEIMPORTTIME": "1"}) as here:
        here.complete()
        imports = IMPORTED.findall(here.log.read_text(errors="replace"))
    for name in imports[:5]:
        say(f"  imported: {name}")
    proof.equals("torch_imports", len(imports), 0, "modules, in an environment that has torch")
    seconds, max_bytes = [], 0
    for _ in range(1 + proof.sized(quick=3, full=7)):
        with served(python, proof.folder) as server:
            seconds.append(server.ready_s)
            server.complete()
            max_bytes = max(max_bytes, held_bytes(server.process.pid))
    proof.at_most("start_s", median(seconds[1:]), 2.5, "the median; the first is not counted")
    proof.report("start_s_spread", max(seconds[1:]) - min(seconds[1:]))
    proof.at_most("idle_gib", max_bytes / GIB, 0.4, "after one answer; unused KV blocks are not resident")
