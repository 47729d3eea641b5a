"""Section "hops": counts the calls between modules for one request on its way in, and for one token on its way out.

A tracer (`tracing/sitecustomize.py`) records the parent and the worker of a real server while a client streams a chat.

    in     from the request's first byte until the worker's scheduler has queued it
    out    from the end of the step that computed the token until its bytes are passed to the socket library

A hop is a call from one module into another; a form is a class of quire that is an argument or a result on the way.
Functions that the server also calls while it is idle are left out.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.record import ROOT, say
from benchmarks.servers import plain_environment
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, section
from tests.support.machine.spawned import LISTENING, spawned

TOKENS = 12
CHAT = {"messages": [{"role": "user", "content": "Count to twenty."}], "stream": True, "max_tokens": TOKENS}
SUBMIT, APPLY, PLAN = (f"quire.core.scheduling.scheduler.Scheduler.{name}" for name in ("submit", "apply", "plan"))
SEND = "quire.worker.parent.handle.WorkerProcess.send"
READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the tracer's output."""

    at_s: float
    is_return: bool
    caller: str
    callee: str
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallPath:
    """The calls of one way in their order, and the classes of their arguments and results."""

    hops: tuple[str, ...]
    forms: frozenset[str]

    @classmethod
    def of(cls, calls: Iterable[Call], idle: frozenset[str] = frozenset()) -> "CallPath":
        counted = [call for call in calls if call.callee not in idle]
        hops = tuple(f"{call.caller} -> {call.callee}" for call in counted if not call.is_return)
        return cls(hops, frozenset(name for call in counted for name in call.classes))


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of both processes, the time when the request was sent, and the functions that run when idle."""

    parent: tuple[Call, ...]
    worker: tuple[Call, ...]
    sent_s: float
    idle: frozenset[str]

    def calls_in(self) -> list[Call]:
        """Calls from the sending of the request until the scheduler has queued it."""
        queued_s = next(call.at_s for call in self.worker if call.is_return and call.callee == SUBMIT)
        handed_s = max(call.at_s for call in self.parent if call.callee == SEND and self.sent_s < call.at_s <= queued_s)
        calls = [call for call in self.parent if self.sent_s < call.at_s <= handed_s]
        calls += [call for call in self.worker if handed_s < call.at_s <= queued_s]
        return [call for call in calls if call.callee not in self.idle]

    def way_in(self) -> CallPath:
        """The hops and forms of the request until the scheduler has queued it."""
        return CallPath.of(self.calls_in())

    def ways_out(self) -> list[CallPath]:
        """The hops and forms of each token, without the first two and the last ones."""
        steps = [call.at_s for call in self.worker if call.callee == APPLY and not call.is_return]
        plans = [call.at_s for call in self.worker if call.callee == PLAN and not call.is_return]
        ways = []
        for begin_s, end_s in list(pairwise(steps))[2 : TOKENS - 3]:
            next_plan_s = next(at_s for at_s in plans if at_s > begin_s)
            calls = [call for call in self.worker if begin_s <= call.at_s < next_plan_s]
            calls += [call for call in self.parent if begin_s <= call.at_s < end_s]
            ways.append(CallPath.of(calls, self.idle))
        return ways


@section("hops")
def hops(proof: Proof) -> None:
    """The medians of a few requests."""
    traces = [trace_chat() for _ in range(proof.sized(quick=2, full=5))]
    ways_out = [way for trace in traces for way in trace.ways_out()]
    for name, ways in ("in", [trace.way_in() for trace in traces]), ("out", ways_out):
        _print(f"the way {name}", _median_way(ways))
        proof.report(f"hops_{name}", median(len(way.hops) for way in ways))
        proof.report(f"forms_{name}", median(len(way.forms) for way in ways))


def _median_way(ways: Sequence[CallPath]) -> CallPath:
    return sorted(ways, key=lambda way: len(way.hops))[len(ways) // 2]


def _print(title: str, way: CallPath) -> None:
    say(f"  {title}: {len(way.hops)} hops, {len(way.forms)} forms")
    for hop in way.hops:
        say(f"    {hop.replace('quire.', '')}")
    say(f"    forms: {', '.join(sorted(name.rpartition('.')[2] for name in way.forms))}")


def trace_chat() -> Trace:
    """Start a server, send it one chat, and return the trace of its processes."""
    with TemporaryDirectory(prefix="quire-seam-") as folder, _traced_server(Path(folder)) as port:
        _chat(port)  # a warm-up: some modules are loaded lazily
        idle_from_s = time.monotonic()
        time.sleep(3.0)
        idle_until_s = time.monotonic()
        sent_s = time.monotonic()
        _chat(port)
        done_s = time.monotonic()
        _flush(port)
        calls = {path.name: _read(path) for path in Path(folder).iterdir() if path.is_file()}
    (worker,) = [trace for trace in calls.values() if any(call.callee == APPLY for call in trace)]
    (parent,) = [trace for trace in calls.values() if any(call.callee == SEND for call in trace)]
    idle = frozenset(call.callee for call in (*worker, *parent) if idle_from_s < call.at_s < idle_until_s)
    return Trace(
        tuple(call for call in parent if sent_s < call.at_s < done_s),
        tuple(call for call in worker if sent_s < call.at_s < done_s),
        sent_s,
        idle,
    )


def _read(path: Path) -> list[Call]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
    calls = [Call(at_s, kind == "return", caller, callee, (*names,)) for at_s, kind, caller, callee, names in lines]
    return sorted(calls, key=lambda call: call.at_s)


@contextmanager
def _traced_server(folder: Path) -> Iterator[int]:
    admin_socket = folder / "run" / "admin.sock"
    command = [sys.executable, "-m", "quire", "serve", str(smollm2_directory()), "--port", "0"]
    command += ["--memory", "4GiB", "--max-model-len", "2048", "--admin-socket", str(admin_socket)]
    paths = (ROOT / "proofs" / "tracing", ROOT / "src")
    environment = {
        **plain_environment(),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SEAM_TRACE_FOLDER": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    with spawned(command, None, environment, stops_s=60) as server:
        port = int(server.wait_for(LISTENING, READY_S))
        server.ready_at(port, READY_S)
        yield port


def _get(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def _flush(port: int) -> None:
    """The tracer writes its lines at a later call: in the parent these requests cause one, in the worker the
    heartbeat does."""
    for _ in range(5):
        time.sleep(0.3)
        _get(port, "/health")


def _chat(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": smollm2_directory().name, **CHAT})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200 or b"[DONE]" not in data:
        raise RuntimeError(f"expected status 200 and a complete stream, got {response.status}: {data[:300]!r}")
