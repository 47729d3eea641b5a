"""Section "hops": what a request passes on its way in and a later token on its way out.

A tracer (`tracing/sitecustomize.py`) watches the parent and the worker of a real server while a client streams a chat.

    in     from the request's first byte until the worker's scheduler has queued it
    out    from the end of the step that made the token until its bytes are handed to the socket's library

A hop is a call from one module into another; a form is a class of quire that is given or returned on the way. What the
server does by itself while nobody asks is not on anybody's way, and is left out.
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
    """One line of the tracer."""

    at_s: float
    is_return: bool
    caller: str
    callee: str
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """What was passed: calls in their order, and classes."""

    hops: tuple[str, ...]
    forms: frozenset[str]

    @classmethod
    def of(cls, calls: Iterable[Call], idle: frozenset[str] = frozenset()) -> "Way":
        kept = [call for call in calls if call.callee not in idle]
        hops = tuple(f"{call.caller} -> {call.callee}" for call in kept if not call.is_return)
        return cls(hops, frozenset(name for call in kept for name in call.classes))


@dataclass(frozen=True, slots=True)
class Trace:
    """What both processes wrote, and when the request was sent and its tokens came."""

    parent: tuple[Call, ...]
    worker: tuple[Call, ...]
    sent_s: float
    idle: frozenset[str]

    def calls_in(self) -> list[Call]:
        """Until the scheduler has it."""
        queued_s = next(call.at_s for call in self.worker if call.is_return and call.callee == SUBMIT)
        handed_s = max(call.at_s for call in self.parent if call.callee == SEND and self.sent_s < call.at_s <= queued_s)
        calls = [call for call in self.parent if self.sent_s < call.at_s <= handed_s]
        calls += [call for call in self.worker if handed_s < call.at_s <= queued_s]
        return [call for call in calls if call.callee not in self.idle]

    def way_in(self) -> Way:
        """The same as a way."""
        return Way.of(self.calls_in())

    def ways_out(self) -> list[Way]:
        """One for each token that is neither the first nor the last ones."""
        steps = [call.at_s for call in self.worker if call.callee == APPLY and not call.is_return]
        plans = [call.at_s for call in self.worker if call.callee == PLAN and not call.is_return]
        ways = []
        for begin_s, end_s in list(pairwise(steps))[2 : TOKENS - 3]:
            next_plan_s = next(at_s for at_s in plans if at_s > begin_s)
            calls = [call for call in self.worker if begin_s <= call.at_s < next_plan_s]
            calls += [call for call in self.parent if begin_s <= call.at_s < end_s]
            ways.append(Way.of(calls, self.idle))
        return ways


@section("hops")
def hops(proof: Proof) -> None:
    """A few requests."""
    traces = [traced() for _ in range(proof.sized(quick=2, full=5))]
    ways_out = [way for trace in traces for way in trace.ways_out()]
    for name, ways in ("in", [trace.way_in() for trace in traces]), ("out", ways_out):
        _print(f"the way {name}", _typical(ways))
        proof.report(f"hops_{name}", median(len(way.hops) for way in ways))
        proof.report(f"forms_{name}", median(len(way.forms) for way in ways))


def _typical(ways: Sequence[Way]) -> Way:
    return sorted(ways, key=lambda way: len(way.hops))[len(ways) // 2]


def _print(title: str, way: Way) -> None:
    say(f"  {title}: {len(way.hops)} hops, {len(way.forms)} forms")
    for hop in way.hops:
        say(f"    {hop.replace('quire.', '')}")
    say(f"    forms: {', '.join(sorted(name.rpartition('.')[2] for name in way.forms))}")


def traced() -> Trace:
    """Send a real server one chat, and read what its processes wrote."""
    with TemporaryDirectory(prefix="quire-seam-") as folder, _serving(Path(folder)) as port:
        _chat(port)  # what is loaded late is loaded now
        idle_from_s = time.monotonic()
        time.sleep(3.0)
        idle_until_s = time.monotonic()
        sent_s = time.monotonic()
        _chat(port)
        done_s = time.monotonic()
        _flush(port)
        calls = {path.name: _read(path) for path in Path(folder).iterdir() if path.is_file()}
    (worker,) = [one for one in calls.values() if any(call.callee == APPLY for call in one)]
    (parent,) = [one for one in calls.values() if any(call.callee == SEND for call in one)]
    idle = frozenset(call.callee for one in (worker, parent) for call in one if idle_from_s < call.at_s < idle_until_s)
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
def _serving(folder: Path) -> Iterator[int]:
    admin = folder / "run" / "admin.sock"
    words = [sys.executable, "-m", "quire", "serve", str(smollm2_directory()), "--port", "0"]
    words += ["--memory", "4GiB", "--max-model-len", "2048", "--admin-socket", str(admin)]
    paths = (ROOT / "proofs" / "tracing", ROOT / "src")
    environment = {
        **plain_environment(),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SEAM_TRACE_FOLDER": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    with spawned(words, None, environment, stops_s=60) as one:
        port = int(one.wait_for(LISTENING, READY_S))
        one.ready_at(port, READY_S)
        yield port


def _get(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def _flush(port: int) -> None:
    """The tracer writes what it has when something is called after a while: the parent by a question, the worker by
    its own beat."""
    for _ in range(5):
        time.sleep(0.3)
        _get(port, "/health")


def _chat(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": smollm2_directory().name, **CHAT})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    told = response.read()
    connection.close()
    if response.status != 200 or b"[DONE]" not in told:
        raise RuntimeError(f"the traced server answered {response.status}: {told[:300]!r}")
