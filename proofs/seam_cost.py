"""What the server itself spends on a request, on a token and on a refusal, here and on the commit before; what a killed
worker costs its clients; and whether the tests would notice bugs.

Both servers run at once and are asked turn about: the machine drifts, and only ratios of neighbours mean anything. The
oracle computes, so that the model does not drown what is measured. Processor time is that of the kernel's own clocks,
in nanoseconds: of the process that serves, and of it and all its children.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

from benchmarks.record import say
from benchmarks.servers import HOST, Command, Running, started
from proofs.api_load import children_of, read_later, stream_bytes
from proofs.before import HERE, Checkout, checked_out
from proofs.machinery import NUM_PROCESSES
from proofs.proof import Proof, section
from proofs.seam_hops import SEAM
from proofs.worker import killed_often
from tests.mutants import ages, dialects, memory, scheduler, seam
from tests.mutants.kill import Mutant, survivors

MAX_SERVER_RATIO, MAX_REFUSAL_RATIO = 1.03, 1.5
STREAMS, LONG = 16, 64
"""Answers at once, and the tokens of a long one."""
STEP_S = 0.02
"""So that no server is ever behind, and each token goes out by itself."""
FULL = ("--running", "1", "--queue", "4", "--step-s", "1.0")
"""A server whose few places stay taken for minutes."""
LET_IN_S = 1.0
"""Whoever has no answer by then waits in the queue."""
MIN_CHUNKS = 0.98
BURST = 10
"""Refusals in a row: over before the time has come that the first of them was told."""
MAX_TRIES = 40
Asked = TypeVar("Asked")
CPUCLOCK_SCHED = 2
NEW = (dialects, seam, ages)
"""Lists of bugs that came with these proofs; those of memory and scheduler were there before."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Milliseconds of processor time."""

    server: float
    """The process that serves."""
    whole: float
    """It and all its children."""

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.server - other.server, self.whole - other.whole)

    def __truediv__(self, count: float) -> "Spent":
        return Spent(self.server / count, self.whole / count)


def spent_by(pid: int) -> Spent:
    """Since it was started."""
    own, todo, whole = _processor_ms(pid), [pid], 0.0
    while todo:
        one = todo.pop()
        whole += own if one == pid else _processor_ms(one)
        todo += children_of(one)
    return Spent(own, whole)


def _processor_ms(pid: int) -> float:
    """What clock_getcpuclockid(3) gives for a process: all its threads, also those that have ended."""
    try:
        return time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) / 1e6
    except OSError:  # it has ended
        return 0.0


def typical(taken: Sequence[Spent]) -> Spent:
    """The median of each."""
    return Spent(median(one.server for one in taken), median(one.whole for one in taken))


@contextmanager
def _both(folder: Path, *words: str) -> Iterator[dict[str, Running]]:
    """A server of the commit before and one of this, with these words on their command lines."""
    with ExitStack() as running:
        before = running.enter_context(checked_out(SEAM))
        yield {
            name: running.enter_context(started(_command(checkout, folder / name, words)))
            for name, checkout in (("before", before), ("here", HERE))
        }


def _command(checkout: Checkout, folder: Path, words: Sequence[str]) -> Command:
    folder.mkdir(parents=True)
    own = ("--port", "{port}", "--admin-socket", str(folder / "run" / "admin.sock"), "--log-format", "json")
    environment = {
        "PYTHONPATH": f"{checkout.root / 'src'}:{checkout.root}",
        "PYTHONSAFEPATH": "1",  # this folder's tests are not those of the commit before
        "XDG_CONFIG_HOME": str(folder),
    }
    return Command((str(checkout.python), "-m", "tests.support.oracle_server", *words, *own), environment=environment)


def _port(server: Running) -> int:
    return int(server.url.rpartition(":")[2])


def in_turn(asked: Mapping[str, Asked], turns: int, ask: Callable[[Asked], Spent]) -> dict[str, list[Spent]]:
    """What each turn cost each server, the first of them another each time."""
    taken: dict[str, list[Spent]] = {name: [] for name in asked}
    for turn in range(turns):
        names = list(asked) if turn % 2 == 0 else list(asked)[::-1]
        for name in names:
            taken[name].append(ask(asked[name]))
    return taken


@dataclass(frozen=True, slots=True)
class Ratios:
    """One figure here over the commit before, turn by turn."""

    here: float
    before: float
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, taken: Mapping[str, Sequence[Spent]], of: Callable[[Spent], float]) -> "Ratios":
        here, before = ([of(one) for one in taken[name]] for name in ("here", "before"))
        return cls(median(here), median(before), tuple(a / b for a, b in zip(here, before, strict=True)))

    @property
    def spread(self) -> float:
        """Of the middle half of the turns."""
        low, _, high = quantiles(self.ratios, n=4)
        return high - low

    def tell(self, proof: Proof, name: str, bound: float) -> None:
        proof.report(f"{name}_ms", self.here)
        proof.report(f"{name}_ms_before", self.before)
        proof.report(f"{name}_ratio_spread", self.spread)
        proof.at_most(f"{name}_ratio", median(self.ratios), bound, "median over the commit before")


# -- a request and a token ---------------------------------------------------------------------------------------------


@section("server_ms")
def server_ms(proof: Proof) -> None:
    """Sixteen streams at a time: of one token, and of many; what is between them is what tokens cost."""
    turns = proof.sized(quick=6, full=40)
    with _both(proof.folder / "asked", "--step-s", str(STEP_S)) as servers:
        one, many = Streams(1), Streams(LONG)
        for server in servers.values():
            many.asked(server)  # what is loaded late is loaded now
        short, long = in_turn(servers, 3 * turns, one.asked), in_turn(servers, turns, many.asked)
    tokens = {name: [(one - typical(short[name])) / (LONG - 1) for one in taken] for name, taken in long.items()}
    for what, taken in (("request", short), ("token", tokens)):
        Ratios.of(taken, lambda one: one.server).tell(proof, f"server_{what}", MAX_SERVER_RATIO)
        whole = Ratios.of(taken, lambda one: one.whole)
        proof.report(f"whole_{what}_ms", whole.here, "with its children")
        proof.report(f"whole_{what}_ratio", median(whole.ratios))


@dataclass
class Streams:
    """Sixteen answers at once, the same ones each time."""

    num_tokens: int
    most_chunks: int = 0
    """In which all of them ever came: a server that is behind joins tokens, and each of them seems to cost less."""

    def asked(self, server: Running) -> Spent:
        """What one answer cost while the server was not behind."""
        for _ in range(MAX_TRIES):
            before = spent_by(server.pid)
            came = stream_bytes(_port(server), [self._body(server, seed) for seed in range(STREAMS)])
            spent = spent_by(server.pid) - before
            num_chunks = sum(self._num_chunks(data) for data in came)
            self.most_chunks = max(self.most_chunks, num_chunks)
            if num_chunks >= MIN_CHUNKS * self.most_chunks:
                return spent / STREAMS
        raise RuntimeError(f"{num_chunks} chunks were sent instead of {self.most_chunks}: the machine is too busy")

    def _body(self, server: Running, seed: int) -> dict[str, object]:
        sizes = {"max_tokens": self.num_tokens, "ignore_eos": True, "seed": seed}
        return {"model": server.card.name, "prompt": "hello there", **sizes}

    def _num_chunks(self, data: bytes) -> int:
        told = read_later(data)
        if not told.is_whole(self.num_tokens):
            raise RuntimeError(f"an answer of {self.num_tokens} tokens came as {data[-300:]!r}")
        return len(told.pieces)


# -- a refusal ---------------------------------------------------------------------------------------------------------


@section("refusal_ms")
def refusal_ms(proof: Proof) -> None:
    """One connection, one request after the other, at a server whose queue is full."""
    turns = proof.sized(quick=20, full=200)
    with _both(proof.folder / "full", *FULL) as servers, ExitStack() as held:
        callers = {name: Caller(server, held) for name, server in servers.items()}
        for caller in callers.values():
            caller.refused(1)  # whoever comes before takes the last places
        taken = in_turn(callers, turns, Caller.refused)
    Ratios.of(taken, lambda one: one.server).tell(proof, "refusal", MAX_REFUSAL_RATIO)


@dataclass
class Caller:
    """Asks a full server for more than it has room for, one request after the other on one connection."""

    server: Running
    held: ExitStack
    """Whoever was let in waits until this is closed."""

    def __post_init__(self) -> None:
        self._connection = self._connected()

    def refused(self, count: int = BURST) -> Spent:
        """What one of so many refusals in a row cost. A time that is told is a promise: now and then somebody is let
        in, and then what was spent so far does not count."""
        for _ in range(MAX_TRIES):
            before = spent_by(self.server.pid)
            if all(self._is_refused() for _ in range(count)):
                return (spent_by(self.server.pid) - before) / count
        raise RuntimeError(f"of {count} requests in a row one was let in, {MAX_TRIES} times; the server is not full")

    def _is_refused(self) -> bool:
        body = {"model": self.server.card.name, "prompt": "hello there", "max_tokens": 400, "ignore_eos": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        try:
            response = self._connection.getresponse()
            response.read()
        except TimeoutError:
            self._connection = self._connected()
            return False
        if response.status not in (429, 503):
            raise RuntimeError(f"a full server answered {response.status}")
        return True

    def _connected(self) -> HTTPConnection:
        connection = HTTPConnection(HOST, _port(self.server), timeout=LET_IN_S)
        self.held.callback(connection.close)
        return connection


# -- kills, and bugs ---------------------------------------------------------------------------------------------------


@section("kill_unequal")
async def kill_unequal(proof: Proof) -> None:
    """The worker of the real model is killed under sixteen streams, again and again."""
    told = await killed_often(proof.random, proof.sized(quick=1, full=100))
    proof.report("kill_count", told.num_kills)
    proof.report("kill_answers", len(told.asks))
    proof.equals("kill_lost", told.num_lost, 0)
    proof.equals("kill_unequal", len(told.asks) - told.num_equal, 0)


@section("mutants")
def mutants(proof: Proof) -> None:
    """Every bug of every list, with the tests that are there to notice it."""
    lists = (*NEW, memory, scheduler) if proof.is_full else (seam, ages)
    alive: list[str] = []
    num_total = num_new = 0
    for module in lists:
        chosen: list[Mutant] = module.MUTANTS if proof.is_full else module.MUTANTS[:2]
        alive += survivors(chosen, module.TESTS, jobs=NUM_PROCESSES)
        num_total += len(chosen)
        num_new += len(chosen) if module in NEW else 0
    for name in alive:
        say(f"  survived: {name}")
    proof.report("mutants_total", num_total)
    proof.at_least("mutants_new", num_new, proof.sized(quick=2, full=15))
    proof.equals("mutants_killed", num_total - len(alive), num_total, "all of them")
