"""What a person with a CPU gets: an environment with nothing but the wheel, and a server that is ready at once.

The wheel is built from this commit and installed into an empty environment; the server is started from there, so that
what is not in the wheel's requirements cannot help.
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
"""A line that Python writes for each module when it is asked for the times of imports."""


@dataclass
class Served(Spawned):
    """A server that said it is ready."""

    port: int
    ready_s: float

    def complete(self, **options: object) -> dict[str, int]:
        """Usage of one short answer, behind which whatever is loaded late is loaded."""
        connection = HTTPConnection(HOST, self.port, timeout=READY_S)
        body = json.dumps({"prompt": "One, two,", "max_tokens": 8, **options})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"a completion was answered with {answer.status}: {read[:300]!r}")
        usage: dict[str, int] = json.loads(read)["usage"]
        return usage


@contextmanager
def served(
    python: Path,
    folder: Path,
    *flags: str,
    model: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Served]:
    """`quire serve` of a file by this interpreter, with these variables set too."""
    port = free_port()
    words = [str(python), "-m", "quire", "serve", str(model or smollm2_file()), "--port", str(port), *flags]
    environment = {**plain_environment(), "PYTHONPATH": "", **variables}
    began_s = time.perf_counter()
    with spawned(words, folder / "serve.log", environment, folder=folder, is_leader=True) as one:
        yield Served(one.process, one.log, port, one.ready_at(port, READY_S) - began_s)


def bytes_in(folder: Path) -> int:
    """On disk, links counted once."""
    files = {
        (one.stat().st_dev, one.stat().st_ino): one.stat().st_blocks * 512
        for one in folder.rglob("*")
        if one.is_file() and not one.is_symlink()
    }
    return sum(files.values())


def held_bytes(leader: int) -> int:
    """Memory of a process and all that it started, workers too, each of which leads a session of its own: pages that
    several share are counted once."""
    parents = {
        int(one.name): parent for one in Path("/proc").iterdir() if one.name.isdigit() if (parent := _parent(one))
    }
    family = {leader}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(_field_bytes(Path("/proc", str(pid), "smaps_rollup"), "Pss:") for pid in family)


def _parent(process: Path) -> int | None:
    """Who started it; None if it has ended meanwhile."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _field_bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # it ended meanwhile
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


@section("the wheel alone")
def alone(proof: Proof) -> None:
    """Bytes of the environment, modules of torch, time to ready with warm files, and memory of an idle server."""
    python = environment_with_wheel(proof.folder)
    proof.at_most("install_mb", bytes_in(python.parents[1]) / MB, 250, "pip included")
    # Where torch is installed, and could be imported.
    with served(Path(sys.executable), proof.folder, variables={"PYTHONPROFILEIMPORTTIME": "1"}) as here:
        here.complete()
        found = IMPORTED.findall(here.log.read_text(errors="replace"))
    for name in found[:5]:
        say(f"  imported: {name}")
    proof.equals("torch_imports", len(found), 0, "modules, in an environment that has torch")
    seconds, held = [], 0
    for _ in range(1 + proof.sized(quick=3, full=7)):
        with served(python, proof.folder) as server:
            seconds.append(server.ready_s)
            server.complete()
            held = max(held, held_bytes(server.process.pid))
    proof.at_most("start_s", median(seconds[1:]), 2.5, "the median; the first is not counted")
    proof.report("start_s_spread", max(seconds[1:]) - min(seconds[1:]))
    proof.at_most("idle_gib", held / GIB, 0.4, "after one answer; blocks that nobody used are not resident")
