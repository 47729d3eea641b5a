"""Hostile grammars at a real `quire serve`: each is refused or compiled soon, and nobody else is held up meanwhile.

They come one after the other, so that the processor time of the server and of its process that checks grammars, taken
before and after, is what one of them cost. The library's own work is done once more in the worker of those that are let
in; there it cannot be told from the model's, and is reported with it.
"""

import http.client
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import say
from benchmarks.servers import HOST
from proofs.api.load import Server, children_of, serve_words, started
from proofs.findings.hostile.hostile_watch import BLOCKED_S, Pause
from proofs.framework.processor_time import spent_by
from proofs.framework.proof import Proof, section
from proofs.framework.stolen_time import StolenTime, watched
from proofs.steps.hostile_schemas import TABLE, HostileGrammar, hostile_grammar

MAX_CHECK_MS = 250.0
HEALTH_EVERY_S = 0.02
CHECKER = "quire.text.grammars.process"
TOLD = (200, 400, 413)
"""Answered, refused, too large."""
SHOWN = 40


@dataclass(frozen=True, slots=True)
class Tried:
    """One of them, and what came of it."""

    name: str
    status: int
    said: str
    """The beginning of the answer."""
    check_ms: float
    """Processor time of the server and of its process that checks grammars."""
    worker_ms: float
    was_ended: bool
    """Its process had to be ended for it."""

    @property
    def is_fine(self) -> bool:
        return self.status in TOLD and self.check_ms <= MAX_CHECK_MS and not self.was_ended


@dataclass
class HealthWatch:
    """Somebody who asks for `/health` again and again."""

    port: int
    stolen: StolenTime
    looks: list[Pause] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """As long as the block runs. What went wrong meanwhile is raised at its end."""
        with ThreadPoolExecutor(1) as thread:
            looking = thread.submit(self._look)
            try:
                yield
            finally:
                self._over.set()
            looking.result()

    def _look(self) -> None:
        queued = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while not self._over.wait(HEALTH_EVERY_S):
            stolen, queued_ns = self.stolen.now(), _queued_ns(queued)
            begun_s = time.monotonic()
            status, _ = answered(self.port, "GET", "/health")
            took_s = time.monotonic() - begun_s
            if status != 200:
                raise RuntimeError(f"/health answered {status}")
            # This thread stands for another machine: what it waits for a processor of this one is not the server's.
            self.looks.append(Pause(took_s, self.stolen.since(stolen), (_queued_ns(queued) - queued_ns) / 1e9))


def _queued_ns(path: Path) -> int:
    return int(path.read_text().split()[1])


def answered(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body, on a connection of its own, as probes have it."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as wire:
        wire.request(method, path, body, {"content-type": "application/json"})
        response = wire.getresponse()
        return response.status, response.read()


@dataclass
class Attacker:
    """Sends them, one after the other, and reads the clocks of the server's processes."""

    server: Server
    num_warm: int = 0

    def asked(self, body: bytes) -> tuple[int, Any]:
        """Status, and the answer as JSON if it is any."""
        status, told = answered(self.server.port, "POST", "/v1/completions", body)
        with suppress(ValueError):
            return status, json.loads(told)
        return status, told.decode(errors="replace")

    def warm(self) -> bool:
        """A grammar of somebody who means well, another each time: whether it is answered as it should be."""
        self.num_warm += 1
        body = {"model": "m", "prompt": "Answer: ", "max_tokens": 8, "guided_choice": [f"yes {self.num_warm}"]}
        status, told = self.asked(json.dumps(body).encode())
        return status == 200 and told["choices"][0]["text"] == f"yes {self.num_warm}"

    def tried(self, one: HostileGrammar) -> Tried:
        """What it came to."""
        checker = checker_of(self.server.pid)
        if checker is None:
            raise RuntimeError("the server has no process that checks grammars")
        before, begun_s = self._clocks(checker), time.monotonic()
        status, told = self.asked(one.body(model="m", prompt="Answer: ", max_tokens=4, temperature=0))
        took_ms = 1000 * (time.monotonic() - begun_s)
        server_ms, check_ms, worker_ms = (now - then for now, then in zip(self._clocks(checker), before, strict=True))
        was_ended = checker_of(self.server.pid) != checker
        if was_ended:
            check_ms = took_ms  # its clock is gone with it
            if not self.warm():
                raise RuntimeError(f"after {one.name} no grammar is answered any more")
        return Tried(one.name, status, _told(told)[:300], server_ms + check_ms, worker_ms, was_ended)

    def _clocks(self, checker: int) -> tuple[float, float, float]:
        """Milliseconds of the server, of its checker, and of all else that it started."""
        server, own = spent_by(self.server.pid), spent_by(checker).server + _forks_ms(checker)
        return server.server, own, server.whole - server.server - spent_by(checker).server


def _forks_ms(pid: int) -> float:
    """Of a process's children that have ended: each grammar is checked in one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) * 1000 / os.sysconf("SC_CLK_TCK")


def checker_of(pid: int) -> int | None:
    """The process that checks grammars for a server, if it has one."""
    for child in children_of(pid):
        with suppress(OSError):
            if CHECKER.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def _told(answer: Any) -> str:
    """Why it was refused, or how it ended."""
    if isinstance(answer, dict) and "error" in answer:
        return str(answer["error"].get("message"))
    if isinstance(answer, dict) and answer.get("choices"):
        return f"ended by {answer['choices'][0].get('finish_reason')}"
    return str(answer)


@section("hostile_schemas")
def hostile_schemas(proof: Proof) -> None:
    """The table and others by seed, while somebody asks for /health."""
    seeds = [proof.random.getrandbits(40) for _ in range(proof.sized(quick=60, full=2_000))]
    cases = [*TABLE, *map(hostile_grammar, seeds)]
    with started(proof.folder, *serve_words(), module="quire serve") as server, watched() as stolen:
        attacker = Attacker(server)
        if not attacker.warm():
            raise RuntimeError("the first grammar was not answered")
        watch = HealthWatch(server.port, stolen)
        with watch.looking():
            tried = [attacker.tried(one) for one in cases]
        is_well = attacker.warm()
        num_restarts = server.num_restarts()
    for line in [line for line in server.lines if "died" in line or "stuck" in line][:SHOWN]:
        say(f"    {line[:300]}")
    report_hostile(proof, tried, watch.looks)
    late = [look for look in watch.looks if look.own_s > BLOCKED_S]
    for look in late[:SHOWN]:
        say(f"    /health after {look.late_s:.3f} s, stolen {look.stolen_s:.3f}, queued {look.queued_s:.3f}")
    bad = [one for one in tried if not one.is_fine]
    for one in bad[:SHOWN]:
        say(f"    {one.name}: {one.status}, {one.check_ms:.0f} ms, {'ended, ' if one.was_ended else ''}{one.said}")
    proof.report("hostile_slow", sum(one.check_ms > MAX_CHECK_MS for one in tried), f"over {MAX_CHECK_MS:g} ms")
    proof.report("hostile_health_late", len(late), f"over {1000 * BLOCKED_S:g} ms")
    proof.equals("hostile_restarts", num_restarts, 0)
    proof.equals("hostile_schemas", len(bad) + len(late) + num_restarts + (not is_well), 0, "failures")


def report_hostile(proof: Proof, tried: Sequence[Tried], looks: Sequence[Pause]) -> None:
    """How many, how slow, how late."""
    slowest = max(tried, key=lambda one: one.check_ms)
    say(f"    slowest: {slowest.name}: {slowest.said}")
    statuses = Counter(one.status for one in tried)
    say(f"    answers: {dict(statuses)}")
    proof.report("hostile_schemas_tried", len(tried))
    proof.at_least("hostile_compiled", statuses[200], len(tried) // 10, "else few were compiled")
    proof.at_least("hostile_refused", statuses[400], len(tried) // 10, "else few were hostile")
    proof.report("hostile_fives", sum(one.status >= 500 for one in tried), "told that it was the server's fault")
    proof.report("hostile_slowest_ms", slowest.check_ms, "processor time")
    proof.report("hostile_worker_ms", max(one.worker_ms for one in tried), "of one request, model and all")
    proof.report("hostile_health_worst_ms", 1000 * max(look.own_s for look in looks), "less what others took")
    proof.report("hostile_health_raw_ms", 1000 * max(look.late_s for look in looks))
    proof.report("hostile_health_looks", len(looks))
