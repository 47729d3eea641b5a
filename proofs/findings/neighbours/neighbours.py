"""What another key notices of one key's attacks: one-token chats and a stream, beside each attack and beside its twin.

The attacks are in `neighbours/bodies.py`; a process of its own sends them. Windows are in turns: an attack, its twin of
as many plain requests of equal length, the attack again. Judged is the median of the rounds' ratios. What the host of a
virtual machine takes for others is read beside them, and a round of which it took much is measured anew.
"""

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, say
from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, started
from proofs.findings.neighbours.bodies import BODIES, CHAT
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

PROBE_EVERY_S = 0.25
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0.0}
STORY = {
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": 4000, "temperature": 0.0, "ignore_eos": True, "stream": True,
}  # fmt: skip
MAX_TTFT_RATIO, MAX_GAP_RATIO = 2.0, 1.5
NUM_QUICK = 8
"""Attacks that a quick run draws."""
FIRST = ("tools_multiples", "grammar_ambiguous", "answer_blanks")
"""A2, A3 and A5: in every run."""
SETTLED_S, WARM_S = 30.0, 4.0
MAX_STOLEN = 0.03
"""A round beside more than this on the machine's host is measured anew: it compares the host with itself."""
NUM_REPEATED = 12
"""Rounds that are measured anew in one run, at most; later ones count as they are."""


@dataclass
class Window:
    """What the other keys saw for some seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stolen: float = 0.0
    """The share of the processors that the machine's host took meanwhile."""


@dataclass
class Neighbour:
    """Two other keys: one chats every quarter of a second, the other reads a stream all the time."""

    port: int
    chat_key: str
    stream_key: str
    calm_s: float = 1.0
    """What a chat takes beside nothing but the stream."""
    window: Window | None = None
    """None: nobody looks."""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A stream is read, again and again."""
        thread = threading.Thread(target=self._read)
        thread.start()
        try:
            yield
        finally:
            self.is_over = True
            thread.join()

    def watch(self, seconds: float) -> Window:
        """Probes for so long; each is waited for. A chat that is late keeps no other from being sent."""
        window = self.window = Window()
        before = processor_ticks()
        probes = [
            threading.Timer(PROBE_EVERY_S * at, self._probe, args=(window,))
            for at in range(int(seconds / PROBE_EVERY_S))
        ]
        for one in probes:
            one.start()
        time.sleep(seconds)
        with self.lock:
            self.window = None
        window.stolen = stolen_since(before)
        for one in probes:
            one.join()
        return window

    def settle(self) -> None:
        """Wait until what the last window began is over."""
        end_s = time.monotonic() + SETTLED_S
        while time.monotonic() < end_s:
            window = Window()
            for _ in range(3):
                self._probe(window)
            if not window.failures and max(window.ttft_s) < 2 * self.calm_s:
                return
            time.sleep(0.5)

    def _probe(self, window: Window) -> None:
        begun_s = time.perf_counter()
        with self._answer(self.chat_key, HELLO) as response:
            response.read()
            if response.status == 200:
                window.ttft_s.append(time.perf_counter() - begun_s)
            else:
                window.failures.append(f"a chat was answered with {response.status}")

    def _read(self) -> None:
        while not self.is_over:
            with self._answer(self.stream_key, STORY) as response:
                self._read_gaps(response)

    def _read_gaps(self, response: http.client.HTTPResponse) -> None:
        last_s = time.perf_counter()
        while not self.is_over and (line := response.readline()):
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            with self.lock:
                if self.window is not None:
                    self.window.gap_s.append(now_s - last_s)
                    if b'"error"' in line:
                        self.window.failures.append(f"the stream ended with {line[:200]!r}")
            last_s = now_s

    @contextmanager
    def _answer(self, key: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            connection.request("POST", CHAT, json.dumps(body), headers)
            yield connection.getresponse()
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of one attack's window to its twin's, at the 95th percentile."""

    ttft: float
    gap: float
    stolen: float
    """Of the window of which more was stolen."""


def processor_ticks() -> list[int]:
    """Of all processors since the machine began: user, nice, system, idle, wait, irq, softirq, stolen."""
    return [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def stolen_since(before: list[int]) -> float:
    """The share of the processors' time that the host had for others."""
    passed = [after - earlier for earlier, after in zip(before, processor_ticks(), strict=True)]
    return passed[7] / max(1, sum(passed))


def p95(values: list[float]) -> float:
    """Of at least two."""
    return statistics.quantiles(values, n=100, method="inclusive")[94]


@contextmanager
def attacked_server(folder: Path) -> Iterator[tuple[Server, Neighbour, list[str]]]:
    """`quire serve` with keys: two of neighbours, and two of the attacker."""
    keys = folder / "keys.json"
    chat, stream, *attackers = (add_key(keys, name) for name in ("chat", "stream", "attacker", "second-attacker"))
    words = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "3GiB", "--tool-format", "hermes")
    with started(folder, *words, "--keys-file", str(keys), module="quire serve") as server:
        neighbour = Neighbour(server.port, chat, stream)
        with neighbour.reading():
            neighbour.watch(WARM_S)
            neighbour.calm_s = p95(neighbour.watch(WARM_S).ttft_s)
            yield server, neighbour, attackers


def measured(port: int, neighbour: Neighbour, keys: list[str], name: str, seconds: float) -> Ratios:
    """One round: the attack, then its twin."""
    came, attacked = _window(port, neighbour, keys, name, seconds, ())
    twin = ("--twin", str(came.pop("requests")), str(came.pop("answer_tokens")))
    _, plain = _window(port, neighbour, keys, name, seconds, twin)
    stolen = max(attacked.stolen, plain.stolen)
    ratios = Ratios(p95(attacked.ttft_s) / p95(plain.ttft_s), p95(attacked.gap_s) / p95(plain.gap_s), stolen)
    say(
        f"  {name}: {came}, twin {twin[1:]}: chat {p95(attacked.ttft_s):.2f} / {p95(plain.ttft_s):.2f} s"
        f" = {ratios.ttft:.2f}, gap {p95(attacked.gap_s):.3f} / {p95(plain.gap_s):.3f} s = {ratios.gap:.2f}"
        f" (longest {max(attacked.gap_s):.2f}, {max(plain.gap_s):.2f}), {stolen:.1%} stolen"
    )
    for failure in (*attacked.failures[:3], *plain.failures[:3]):
        say(f"    {failure}")
    return ratios


def _window(
    port: int, neighbour: Neighbour, keys: list[str], name: str, seconds: float, twin: tuple[str, ...]
) -> tuple[dict[str, int], Window]:
    attack = BODIES[name]
    own = keys[: attack.num_keys]
    # An attacker is another machine: what it costs to send must not be taken from the processors that serve.
    words = ["nice", "-n", "19", sys.executable, "-m", "proofs.findings.neighbours.attacks", str(port), name]
    words += [str(seconds + 1.0), *twin, *(["--"] if twin else []), *own]
    neighbour.settle()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1.0)  # until it has begun
        window = neighbour.watch(seconds)
        output, _ = process.communicate(timeout=600)
    return json.loads(output.splitlines()[-1]), window


@section("neighbours")
def neighbours(proof: Proof) -> None:
    """Every attack in turns with its twin; quick, some of them."""
    rounds, seconds = proof.sized(quick=1, full=3), float(proof.sized(quick=6, full=20))
    others = [name for name in BODIES if name not in FIRST]
    chosen = [*FIRST, *(others if proof.is_full else proof.random.sample(others, NUM_QUICK - len(FIRST)))]
    ratios = dict[str, list[Ratios]]()
    num_repeated = 0
    with attacked_server(proof.folder) as (server, neighbour, keys):
        for _ in range(rounds):
            for name in chosen:
                found = measured(server.port, neighbour, keys, name, seconds)
                while found.stolen > MAX_STOLEN and num_repeated < NUM_REPEATED:
                    num_repeated += 1
                    found = measured(server.port, neighbour, keys, name, seconds)
                ratios.setdefault(name, []).append(found)
    ttft = {name: statistics.median(one.ttft for one in own) for name, own in ratios.items()}
    gap = {name: statistics.median(one.gap for one in own) for name, own in ratios.items()}
    for name in chosen:
        proof.report(f"neighbour_ttft_{name}", ttft[name])
        proof.report(f"neighbour_gap_{name}", gap[name])
    proof.report("neighbour_attacks", len(chosen))
    proof.report("neighbour_rounds_repeated", num_repeated)
    proof.at_most("neighbour_ttft", max(ttft.values()), MAX_TTFT_RATIO, f"of {max(ttft, key=lambda one: ttft[one])}")
    proof.at_most("neighbour_gap", max(gap.values()), MAX_GAP_RATIO, f"of {max(gap, key=lambda one: gap[one])}")
