"""A server that works looks alive: while a long prompt is read, beside a busy machine, and when it does not work.

The hardest case of a surface is a step that lasts: a paced model of 24 layers, whose steps of fixed size take 20 s. The
coder runs as it is served. Every surface is read again and again, each by its own reader; what all of them show is the
number of computed tokens. How old a surface is: at the moment of a reading, for how long that number or a larger one
had been known to any reader. So a surface that lags is old, and where all stand still, all grow old.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from statistics import quantiles
from typing import Any

from benchmarks.packaged_models import coder_file
from benchmarks.record import say
from benchmarks.servers import HOST
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.cli.watch.top_figures import json_fields
from quire.cli.watch.top_watcher import fetch_once
from quire.cli.watch.watch_source import WatchSource, choose_source

POLL_S = 0.25
MAX_AGE_S = 2.0
MAX_STILL_S = 3.0
NUM_LOOPS = 8
TOKEN_S = 0.08
"""Of the paced model: 256 tokens take 20 s."""
STUCK_S = 3.0
FOUND_S = 1.0
"""What finding a hung worker may take beyond its limit: a look every 0.1 s, and a machine that is busy."""
LOOP = "while True: pass"


@dataclass
class Readings:
    """Who showed how many computed tokens, and when."""

    shown: list[tuple[str, float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, surface: str, num_computed: int) -> None:
        with self.lock:
            self.shown.append((surface, time.monotonic(), num_computed))

    def ages_s(self, began_s: float, ended_s: float) -> dict[str, list[float]]:
        """Of each reading of each surface, once the prompt was being computed."""
        first_s: list[tuple[int, float]] = []
        ages: dict[str, list[float]] = {}
        for surface, at_s, count in sorted(self.shown, key=lambda one: one[1]):
            if not first_s or count > first_s[-1][0]:
                first_s.append((count, at_s))
            if began_s <= at_s <= ended_s:
                known_s = next(since_s for known, since_s in first_s if known >= count)
                ages.setdefault(surface, []).append(at_s - max(known_s, began_s))
        return ages

    def longest_still_s(self, surface: str, began_s: float, ended_s: float) -> float:
        """For how long a surface showed the same number."""
        longest_s, since_s, last = 0.0, began_s, -1
        for name, at_s, count in self.shown:
            if name != surface or not began_s <= at_s <= ended_s:
                continue
            longest_s = max(longest_s, at_s - since_s)
            if count != last:
                since_s, last = at_s, count
        return longest_s


class Watching:
    """Reads all surfaces of a server until it is left."""

    def __init__(self, server: Server) -> None:
        self.server, self.readings, self.is_over = server, Readings(), threading.Event()
        self.ready: list[int] = []
        self.states: set[str] = set()
        self._threads = ThreadPoolExecutor(5)

    def __enter__(self) -> "Watching":
        for read in (self._stats, self._metrics, self._top, self._dashboard, self._ready):
            self._threads.submit(self._again, read)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._threads.shutdown(wait=True)

    def _again(self, read: Callable[[], None]) -> None:
        while not self.is_over.is_set():
            with suppress(OSError, ValueError, KeyError):
                read()
            self.is_over.wait(POLL_S)

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(HOST, self.server.port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stats(self) -> None:
        (model,) = self.server.admin("/stats")["models"]
        self.states.add(model["state"])
        self.readings.add("stats", model["engine"]["num_computed_tokens"])

    def _metrics(self) -> None:
        _, page = self._get("/metrics")
        line = next(one for one in page.decode().splitlines() if one.startswith("quire:computed_tokens_total"))
        self.readings.add("metrics", int(float(line.rpartition(" ")[2])))

    def _top(self) -> None:
        # What `quire top --once --json` does; a process for each would measure how long processes take to start.
        told = json_fields(fetch_once(choose_source(self.server.url, None), None))
        self.readings.add("top", told["engine"]["num_computed_tokens"])

    def _ready(self) -> None:
        self.ready.append(self._get("/ready")[0])

    def _dashboard(self) -> None:
        for snapshot in WatchSource(self.server.url, self.server.admin_path).snapshots():
            if (engine := json.loads(snapshot)["engine"]) is not None:
                self.readings.add("dashboard", engine["num_computed_tokens"])
            if self.is_over.is_set():
                return


@contextmanager
def asked(server: Server, prompt: Any) -> Iterator[None]:
    """While somebody waits for the answer to this prompt."""
    connection = HTTPConnection(HOST, server.port, timeout=30)
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    try:
        yield
    finally:
        connection.close()


def computed(server: Server) -> int:
    return int(server.admin("/stats")["models"][0]["engine"]["num_computed_tokens"])


def judge_ages(proof: Proof, name: str, watching: Watching, began_s: float, ended_s: float) -> tuple[float, float]:
    """The oldest surface's age, p99, and the longest that computed tokens stood still on any."""
    ages = watching.readings.ages_s(began_s, ended_s)
    stills = [watching.readings.longest_still_s(one, began_s, ended_s) for one in ("stats", "metrics", "dashboard")]
    for surface in ("stats", "metrics", "top", "dashboard"):
        found = ages.get(surface, [])
        p99_s = quantiles([*found, *found], n=100, method="inclusive")[98] if found else float("nan")
        proof.report(f"{name}_{surface}_age_s", p99_s)
        proof.report(f"{name}_{surface}_readings", len(found))
    return max(float(proof.figures[f"{name}_{one}_age_s"]) for one in ("stats", "metrics", "top", "dashboard")), max(
        stills
    )


def watched(server: Server, prompt: Any, lasts_s: float, num_tokens: int) -> tuple[Watching, float, float]:
    """All surfaces while a prompt of so many tokens is read, for so long at most."""
    with Watching(server) as watching, asked(server, prompt):
        until_s = time.monotonic() + 60.0
        while not computed(server) and time.monotonic() < until_s:
            time.sleep(0.05)
        began_s = time.monotonic()
        while time.monotonic() - began_s < lasts_s and computed(server) < num_tokens - 32:
            time.sleep(0.1)
        ended_s = time.monotonic()
    return watching, began_s, ended_s


def paced_words(num_tokens: int, *words: str) -> tuple[str, ...]:
    length = str(num_tokens + 512)
    return "--token-s", str(TOKEN_S), "--sequence-tokens", length, "--stuck-step-s", str(STUCK_S), *words


def coder_words() -> tuple[str, ...]:
    return str(coder_file()), "--max-running", "16", "--max-model-len", "16384"


def long_prompt(num_tokens: int, last: int) -> list[int]:
    """No block of it is another's."""
    return [(at * 7919 + at // 97) % last for at in range(num_tokens)]


@section("alive surfaces")
def surfaces(proof: Proof) -> None:
    lasts_s = proof.sized(quick=24.0, full=240.0)
    num_tokens = int(lasts_s / TOKEN_S)
    found = []
    with started(proof.folder, *paced_words(num_tokens)) as server:
        found.append(judge_ages(proof, "paced", *watched(server, long_prompt(num_tokens, 90), lasts_s, num_tokens)))
    with started(proof.folder, *coder_words(), module="quire serve") as server:
        found.append(judge_ages(proof, "coder", *watched(server, long_prompt(15_000, 50_000), lasts_s, 15_000)))
    proof.at_most("stale_s", max(age_s for age_s, _ in found), MAX_AGE_S)
    proof.at_most("still_s", max(still_s for _, still_s in found), MAX_STILL_S)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Programs that want all processors, as many as there are none for."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(NUM_LOOPS)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@section("alive beside busy loops")
def beside_busy_loops(proof: Proof) -> None:
    lasts_s = proof.sized(quick=20.0, full=120.0)
    num_tokens = int(lasts_s / TOKEN_S)
    flips = restarts = 0
    with ExitStack() as stack:
        paced = stack.enter_context(started(proof.folder, *paced_words(num_tokens)))
        coder = stack.enter_context(started(proof.folder, *coder_words(), module="quire serve"))
        stack.enter_context(busy_loops())
        for name, server, prompt in (
            ("paced", paced, long_prompt(num_tokens, 90)),
            ("coder", coder, long_prompt(15_000, 50_000)),
        ):
            watching, _, _ = watched(server, prompt, lasts_s, len(prompt))
            flips += sum(one != 200 for one in watching.ready)
            restarts += server.num_restarts()
            proof.report(f"{name}_was_busy", "busy" in watching.states)
            proof.report(f"{name}_ready_polls", len(watching.ready))
            say(f"    {name}: states {', '.join(sorted(watching.states))}")
    proof.equals("ready_flips", flips, 0)
    proof.equals("false_restarts", restarts, 0)


@section("alive or hung")
def hung(proof: Proof) -> None:
    num_times = proof.sized(quick=4, full=20)
    found, longest_s = 0, 0.0
    with started(proof.folder, *paced_words(2_000)) as server:
        for number in range(num_times):
            # Workers that made no progress, five in a row, are not replaced again: between two hangs one answers.
            with asked(server, [number]):
                until(lambda: server.admin("/stats")["models"][0]["engine"]["num_steps"] > 1)
            with asked(server, long_prompt(1_500, 90)[number:]):
                before = computed(server)
                until(lambda: computed(server) > before + 1 and is_in_a_step(server))  # noqa: B023 - it ends here
                (worker,) = workers_of(server)
                os.kill(worker, signal.SIGSTOP)
                stopped_s = time.monotonic()
                while worker in workers_of(server) and time.monotonic() - stopped_s < 60.0:
                    time.sleep(0.02)
                took_s = time.monotonic() - stopped_s
                found += took_s <= STUCK_S + FOUND_S
                longest_s = max(longest_s, took_s)
            until(lambda: server.admin("/stats")["models"][0]["state"] in ("ready", "busy"))
        proof.report("hung_restarts", server.num_restarts())
    proof.report("hung_longest_s", longest_s)
    proof.equals("hung_found", found / num_times, 1, f"within {STUCK_S + FOUND_S:g} s, {num_times} of {num_times}")


def is_in_a_step(server: Server) -> bool:
    return float(server.admin("/stats")["models"][0]["engine"]["step_s"]) > 0.0


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what must come. Raises RuntimeError."""
    end_s = time.monotonic() + 60.0
    while not is_so():
        if time.monotonic() > end_s:
            raise RuntimeError("it did not come within a minute")
        time.sleep(0.02)


def workers_of(server: Server) -> list[int]:
    """Processes of it that own a model."""

    def is_one(pid: int) -> bool:
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"worker\0" in file.read()
        return False

    return [pid for pid in server.pids()[1:] if is_one(pid)]
