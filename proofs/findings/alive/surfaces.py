"""A server that works must look alive on all its surfaces, also on a busy machine, and a hung worker must be found.

A *surface* shows the number of computed tokens: `/stats`, `/metrics`, `quire top` and the dashboard. The hardest case
is a long step: a paced (simulated) model has steps of 20 s. The other case is a real coder model. A reader polls each
surface. The *age* of a reading is the time since any reader first saw that number or a larger one: a surface that lags
has a high age, and if no surface changes, the ages of all grow.
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
NUM_LOOPS, LOOP = 8, "while True: pass"
TOKEN_S = 0.08
"""Time for a token in the paced model: 256 tokens take 20 s."""
STUCK_S = 3.0
MAX_DETECTION_S = 1.0
"""How long finding a hung worker may take beyond STUCK_S: it is polled every 0.1 s, and the machine may be busy."""
SURFACES = ("stats", "metrics", "top", "dashboard")


@dataclass
class Readings:
    """Which surface showed how many computed tokens, and when."""

    rows: list[tuple[str, float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, surface: str, num_computed: int) -> None:
        with self.lock:
            self.rows.append((surface, time.monotonic(), num_computed))

    def ages_s(self, start_s: float, end_s: float) -> dict[str, list[float]]:
        """The ages of all readings of each surface between these times."""
        maxima: list[tuple[int, float]] = []
        ages: dict[str, list[float]] = {}
        for surface, time_s, count in sorted(self.rows, key=lambda row: row[1]):
            if not maxima or count > maxima[-1][0]:
                maxima.append((count, time_s))
            if start_s <= time_s <= end_s:
                first_s = next(since_s for maximum, since_s in maxima if maximum >= count)
                ages.setdefault(surface, []).append(time_s - max(first_s, start_s))
        return ages

    def longest_still_s(self, surface: str, start_s: float, end_s: float) -> float:
        """The longest time for which a surface showed the same number."""
        longest_s, since_s, last = 0.0, start_s, -1
        for name, time_s, count in self.rows:
            if name != surface or not start_s <= time_s <= end_s:
                continue
            longest_s = max(longest_s, time_s - since_s)
            if count != last:
                since_s, last = time_s, count
        return longest_s


class SurfaceReaders:
    """Read all surfaces of a server, each in a thread, while the `with` block runs."""

    def __init__(self, server: Server) -> None:
        self.server, self.readings, self.is_over = server, Readings(), threading.Event()
        self.ready_statuses: list[int] = []
        self.states: set[str] = set()
        self._threads = ThreadPoolExecutor(5)

    def __enter__(self) -> "SurfaceReaders":
        for read in (self._stats, self._metrics, self._top, self._dashboard, self._ready):
            self._threads.submit(self._poll, read)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._threads.shutdown(wait=True)

    def _poll(self, read: Callable[[], None]) -> None:
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
        line = next(line for line in page.decode().splitlines() if line.startswith("quire:computed_tokens_total"))
        self.readings.add("metrics", int(float(line.rpartition(" ")[2])))

    def _top(self) -> None:
        # As `quire top --once --json` does, but without a process for each reading, whose start would take too long.
        fields = json_fields(fetch_once(choose_source(self.server.url, None), None))
        self.readings.add("top", fields["engine"]["num_computed_tokens"])

    def _ready(self) -> None:
        self.ready_statuses.append(self._get("/ready")[0])

    def _dashboard(self) -> None:
        for snapshot in WatchSource(self.server.url, self.server.admin_path).snapshots():
            if (engine := json.loads(snapshot)["engine"]) is not None:
                self.readings.add("dashboard", engine["num_computed_tokens"])
            if self.is_over.is_set():
                return


@contextmanager
def open_request(server: Server, prompt: Any) -> Iterator[None]:
    """Keep a request with this prompt open while the block runs."""
    connection = HTTPConnection(HOST, server.port, timeout=30)
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    try:
        yield
    finally:
        connection.close()


def num_computed(server: Server) -> int:
    return int(server.admin("/stats")["models"][0]["engine"]["num_computed_tokens"])


def report_ages(proof: Proof, name: str, readers: SurfaceReaders, start_s: float, end_s: float) -> tuple[float, float]:
    """The largest p99 age of any surface, and the longest time for which any surface showed the same number."""
    ages = readers.readings.ages_s(start_s, end_s)
    stills_s = [readers.readings.longest_still_s(one, start_s, end_s) for one in ("stats", "metrics", "dashboard")]
    for surface in SURFACES:
        ages_s = ages.get(surface, [])
        p99_s = quantiles([*ages_s, *ages_s], n=100, method="inclusive")[98] if ages_s else float("nan")
        proof.report(f"{name}_{surface}_age_s", p99_s)
        proof.report(f"{name}_{surface}_readings", len(ages_s))
    return max(float(proof.figures[f"{name}_{surface}_age_s"]) for surface in SURFACES), max(stills_s)


def read_surfaces(server: Server, prompt: Any, max_s: float, num_tokens: int) -> tuple[SurfaceReaders, float, float]:
    """Read all surfaces while a prompt of so many tokens is computed; returns the readers, the start and the end."""
    with SurfaceReaders(server) as readers, open_request(server, prompt):
        deadline_s = time.monotonic() + 60.0
        while not num_computed(server) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        start_s = time.monotonic()
        while time.monotonic() - start_s < max_s and num_computed(server) < num_tokens - 32:
            time.sleep(0.1)
        end_s = time.monotonic()
    return readers, start_s, end_s


def paced_words(num_tokens: int, *words: str) -> tuple[str, ...]:
    length = str(num_tokens + 512)
    return "--token-s", str(TOKEN_S), "--sequence-tokens", length, "--stuck-step-s", str(STUCK_S), *words


def coder_words() -> tuple[str, ...]:
    return str(coder_file()), "--max-running", "16", "--max-model-len", "16384"


def long_prompt(num_tokens: int, num_ids: int) -> list[int]:
    """A prompt whose blocks all differ, of token ids below `num_ids`."""
    return [(position * 7919 + position // 97) % num_ids for position in range(num_tokens)]


@section("alive surfaces")
def surfaces(proof: Proof) -> None:
    max_s = proof.sized(quick=24.0, full=240.0)
    num_tokens = int(max_s / TOKEN_S)
    times_s = []
    with started(proof.folder, *paced_words(num_tokens)) as server:
        run = read_surfaces(server, long_prompt(num_tokens, num_ids=90), max_s, num_tokens)
        times_s.append(report_ages(proof, "paced", *run))
    with started(proof.folder, *coder_words(), module="quire serve") as server:
        run = read_surfaces(server, long_prompt(15_000, num_ids=50_000), max_s, 15_000)
        times_s.append(report_ages(proof, "coder", *run))
    proof.at_most("stale_s", max(age_s for age_s, _ in times_s), MAX_AGE_S)
    proof.at_most("still_s", max(still_s for _, still_s in times_s), MAX_STILL_S)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Run NUM_LOOPS processes that each keep a processor busy."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(NUM_LOOPS)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


@section("alive beside busy loops")
def beside_busy_loops(proof: Proof) -> None:
    max_s = proof.sized(quick=20.0, full=120.0)
    num_tokens = int(max_s / TOKEN_S)
    num_flips = num_restarts = 0
    with ExitStack() as stack:
        paced = stack.enter_context(started(proof.folder, *paced_words(num_tokens)))
        coder = stack.enter_context(started(proof.folder, *coder_words(), module="quire serve"))
        stack.enter_context(busy_loops())
        for name, server, prompt in (
            ("paced", paced, long_prompt(num_tokens, num_ids=90)),
            ("coder", coder, long_prompt(15_000, num_ids=50_000)),
        ):
            readers, _, _ = read_surfaces(server, prompt, max_s, len(prompt))
            num_flips += sum(status != 200 for status in readers.ready_statuses)
            num_restarts += server.num_restarts()
            proof.report(f"{name}_was_busy", "busy" in readers.states)
            proof.report(f"{name}_ready_polls", len(readers.ready_statuses))
            say(f"    {name}: states {', '.join(sorted(readers.states))}")
    proof.equals("ready_flips", num_flips, 0)
    proof.equals("false_restarts", num_restarts, 0)


@section("alive or hung")
def hung(proof: Proof) -> None:
    num_times = proof.sized(quick=4, full=20)
    num_found, longest_s = 0, 0.0
    with started(proof.folder, *paced_words(2_000)) as server:
        for number in range(num_times):
            # After five workers without progress in a row there would be no new one; so each worker answers once.
            with open_request(server, [number]):
                until(lambda: server.admin("/stats")["models"][0]["engine"]["num_steps"] > 1)
            with open_request(server, long_prompt(1_500, num_ids=90)[number:]):
                num_before = num_computed(server)
                until(lambda: num_computed(server) > num_before + 1 and is_in_a_step(server))  # noqa: B023 - runs now
                (worker,) = workers_of(server)
                os.kill(worker, signal.SIGSTOP)
                stopped_s = time.monotonic()
                while worker in workers_of(server) and time.monotonic() - stopped_s < 60.0:
                    time.sleep(0.02)
                detection_s = time.monotonic() - stopped_s
                num_found += detection_s <= STUCK_S + MAX_DETECTION_S
                longest_s = max(longest_s, detection_s)
            until(lambda: server.admin("/stats")["models"][0]["state"] in ("ready", "busy"))
        proof.report("hung_restarts", server.num_restarts())
    proof.report("hung_longest_s", longest_s)
    proof.equals("hung_found", num_found / num_times, 1, f"all of {num_times} within {STUCK_S + MAX_DETECTION_S:g} s")


def is_in_a_step(server: Server) -> bool:
    return float(server.admin("/stats")["models"][0]["engine"]["step_s"]) > 0.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. Raises RuntimeError after a minute."""
    end_s = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError("the condition did not become true within a minute")
        time.sleep(0.02)


def workers_of(server: Server) -> list[int]:
    """The server's child processes that are workers."""

    def is_worker(pid: int) -> bool:
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"worker\0" in file.read()
        return False

    return [pid for pid in server.pids()[1:] if is_worker(pid)]
