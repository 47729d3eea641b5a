"""Hostile grammars at a real `quire serve`: each is refused or compiled quickly, and other requests are not delayed.

They are sent one after the other, so that the difference of processor times before and after is the cost of one of
them, in the server and in its process that checks grammars. The worker compiles an accepted grammar again; its cost
there cannot be separated from the model's, and both are reported together.
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
from proofs.framework.processor_time import processor_time_of
from proofs.framework.proof import Proof, section
from proofs.framework.stolen_time import StolenTime, watch_stolen_time
from proofs.steps.hostile_schemas import TABLE, HostileGrammar, hostile_grammar

MAX_CHECK_MS = 250.0
HEALTH_EVERY_S = 0.02
CHECKER = "quire.text.grammars.process"
EXPECTED_STATUSES = (200, 400, 413)
"""Answered, refused, too large."""
SHOWN = 40


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A hostile grammar that was sent, and its result."""

    name: str
    status: int
    text: str
    """The beginning of the answer's text or message."""
    check_ms: float
    """Processor time of the server and of its process that checks grammars."""
    worker_ms: float
    was_ended: bool
    """Whether the process that checks grammars had to be ended."""

    @property
    def is_fine(self) -> bool:
        return self.status in EXPECTED_STATUSES and self.check_ms <= MAX_CHECK_MS and not self.was_ended


@dataclass
class HealthWatch:
    """A client that polls `/health` and measures delays."""

    port: int
    stolen: StolenTime
    pauses: list[Pause] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll while the block runs; an error of a poll is raised at the end of the block."""
        with ThreadPoolExecutor(1) as thread:
            polls = thread.submit(self._poll)
            try:
                yield
            finally:
                self._stop.set()
            polls.result()

    def _poll(self) -> None:
        queued = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while not self._stop.wait(HEALTH_EVERY_S):
            stolen, queued_ns = self.stolen.now(), _queued_ns(queued)
            start_s = time.monotonic()
            status, _ = request(self.port, "GET", "/health")
            took_s = time.monotonic() - start_s
            if status != 200:
                raise RuntimeError(f"/health answered {status}")
            # This thread plays a client on another machine: its own wait for a processor is not the server's delay.
            self.pauses.append(Pause(took_s, self.stolen.since(stolen), (_queued_ns(queued) - queued_ns) / 1e9))


def _queued_ns(path: Path) -> int:
    return int(path.read_text().split()[1])


def request(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of a request on a new connection, as probes use."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as wire:
        wire.request(method, path, body, {"content-type": "application/json"})
        response = wire.getresponse()
        return response.status, response.read()


@dataclass
class Attacker:
    """Sends hostile grammars, one after the other, and reads the processor clocks of the server's processes."""

    server: Server
    num_warm: int = 0

    def complete(self, body: bytes) -> tuple[int, Any]:
        """Status, and the answer as JSON, or as text if it is no JSON."""
        status, data = request(self.server.port, "POST", "/v1/completions", body)
        with suppress(ValueError):
            return status, json.loads(data)
        return status, data.decode(errors="replace")

    def warm(self) -> bool:
        """Send a harmless grammar, another each time; returns whether its answer is right."""
        self.num_warm += 1
        body = {"model": "m", "prompt": "Answer: ", "max_tokens": 8, "guided_choice": [f"yes {self.num_warm}"]}
        status, answer = self.complete(json.dumps(body).encode())
        return status == 200 and answer["choices"][0]["text"] == f"yes {self.num_warm}"

    def send(self, grammar: HostileGrammar) -> TrialResult:
        """Send a hostile grammar and measure its cost."""
        checker = checker_of(self.server.pid)
        if checker is None:
            raise RuntimeError("the server has no process that checks grammars")
        clocks, start_s = self._clocks(checker), time.monotonic()
        status, answer = self.complete(grammar.body(model="m", prompt="Answer: ", max_tokens=4, temperature=0))
        elapsed_ms = 1000 * (time.monotonic() - start_s)
        server_ms, check_ms, worker_ms = (new - old for new, old in zip(self._clocks(checker), clocks, strict=True))
        was_ended = checker_of(self.server.pid) != checker
        if was_ended:
            check_ms = elapsed_ms  # its clock ended with it
            if not self.warm():
                raise RuntimeError(f"after {grammar.name}, a harmless grammar gets a wrong answer")
        return TrialResult(grammar.name, status, _outcome(answer)[:300], server_ms + check_ms, worker_ms, was_ended)

    def _clocks(self, checker: int) -> tuple[float, float, float]:
        """Processor milliseconds of the server, of its checker, and of all other processes that it started."""
        server, checker_ms = processor_time_of(self.server.pid), processor_time_of(checker).process + _forks_ms(checker)
        return server.process, checker_ms, server.tree - server.process - processor_time_of(checker).process


def _forks_ms(pid: int) -> float:
    """Processor milliseconds of a process's ended children: each grammar is checked in a child."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) * 1000 / os.sysconf("SC_CLK_TCK")


def checker_of(pid: int) -> int | None:
    """The process that checks grammars for a server, if it has one."""
    for child in children_of(pid):
        with suppress(OSError):
            if CHECKER.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def _outcome(answer: Any) -> str:
    """The message of a refusal, or the finish reason."""
    if isinstance(answer, dict) and "error" in answer:
        return str(answer["error"].get("message"))
    if isinstance(answer, dict) and answer.get("choices"):
        return f"ended by {answer['choices'][0].get('finish_reason')}"
    return str(answer)


@section("hostile_schemas")
def hostile_schemas(proof: Proof) -> None:
    """Send the table of grammars and random ones, while a client polls /health."""
    seeds = [proof.random.getrandbits(40) for _ in range(proof.sized(quick=60, full=2_000))]
    cases = [*TABLE, *map(hostile_grammar, seeds)]
    with started(proof.folder, *serve_words(), module="quire serve") as server, watch_stolen_time() as stolen:
        attacker = Attacker(server)
        if not attacker.warm():
            raise RuntimeError("the first grammar was not answered")
        watch = HealthWatch(server.port, stolen)
        with watch.polling():
            results = [attacker.send(case) for case in cases]
        is_alive = attacker.warm()
        num_restarts = server.num_restarts()
    for line in [line for line in server.lines if "died" in line or "stuck" in line][:SHOWN]:
        say(f"    {line[:300]}")
    report_hostile(proof, results, watch.pauses)
    late_polls = [pause for pause in watch.pauses if pause.own_s > BLOCKED_S]
    for pause in late_polls[:SHOWN]:
        say(f"    /health after {pause.late_s:.3f} s, stolen {pause.stolen_s:.3f}, queued {pause.queued_s:.3f}")
    failures = [result for result in results if not result.is_fine]
    for bad in failures[:SHOWN]:
        say(f"    {bad.name}: {bad.status}, {bad.check_ms:.0f} ms, {'ended, ' if bad.was_ended else ''}{bad.text}")
    proof.report("hostile_slow", sum(result.check_ms > MAX_CHECK_MS for result in results), f"over {MAX_CHECK_MS:g} ms")
    proof.report("hostile_health_late", len(late_polls), f"over {1000 * BLOCKED_S:g} ms")
    proof.equals("hostile_restarts", num_restarts, 0)
    proof.equals("hostile_schemas", len(failures) + len(late_polls) + num_restarts + (not is_alive), 0, "failures")


def report_hostile(proof: Proof, results: Sequence[TrialResult], pauses: Sequence[Pause]) -> None:
    """Report counts, processor times and delays."""
    slowest = max(results, key=lambda result: result.check_ms)
    say(f"    slowest: {slowest.name}: {slowest.text}")
    statuses = Counter(result.status for result in results)
    say(f"    answers: {dict(statuses)}")
    proof.report("hostile_schemas_tried", len(results))
    proof.at_least("hostile_compiled", statuses[200], len(results) // 10, "else few were compiled")
    proof.at_least("hostile_refused", statuses[400], len(results) // 10, "else few were hostile")
    proof.report("hostile_fives", sum(result.status >= 500 for result in results), "answered with a 5xx")
    proof.report("hostile_slowest_ms", slowest.check_ms, "processor time")
    proof.report("hostile_worker_ms", max(result.worker_ms for result in results), "of one request, model and all")
    proof.report("hostile_health_worst_ms", 1000 * max(pause.own_s for pause in pauses), "less what others took")
    proof.report("hostile_health_raw_ms", 1000 * max(pause.late_s for pause in pauses))
    proof.report("hostile_health_looks", len(pauses))
