"""How much one key's attacks slow another key: one-token chats and a stream, beside each attack and beside its twin.

The attacks are in `neighbours/bodies.py`; a separate process sends them. A round has two windows: the attack, then its
*twin*, as many plain requests of equal length. The median of the rounds' ratios is judged. If the host of this virtual
machine *stole* much processor time in a round, for other machines, the round is measured again.
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
TTFT, GAP = "neighbour_ttft_", "neighbour_gap_"
"""What keys of an attack begin with."""
ALWAYS = ("tools_multiples", "grammar_ambiguous", "answer_blanks")
"""Attacks of every run: those of findings A2, A3 and A5."""
SETTLED_S, WARM_S = 30.0, 4.0
MAX_STOLEN = 0.03
"""A round with a larger stolen share is measured again: its ratio is that of two loads of the host."""
MAX_REPEATED = 12
"""How many rounds of one section are measured again, at most; later rounds count as they are."""


@dataclass
class Window:
    """Latencies and failures of the other keys' requests for some seconds."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stolen: float = 0.0
    """The share of the processors' time that the host stole meanwhile."""


@dataclass
class Neighbour:
    """Two other keys: one sends a chat every quarter of a second, the other reads one stream after the other."""

    port: int
    chat_key: str
    stream_key: str
    calm_s: float = 1.0
    """How long a chat takes if only the stream runs beside it."""
    window: Window | None = None
    """Where gaps of the stream are recorded; None: nowhere."""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one stream after the other while the block runs."""
        thread = threading.Thread(target=self._read)
        thread.start()
        try:
            yield
        finally:
            self.is_over = True
            thread.join()

    def watch(self, seconds: float) -> Window:
        """Record a window of so many seconds. Chats are sent on time even if earlier ones have no answer yet."""
        window = self.window = Window()
        ticks = processor_ticks()
        probes = [
            threading.Timer(PROBE_EVERY_S * i, self._probe, args=(window,)) for i in range(int(seconds / PROBE_EVERY_S))
        ]
        for timer in probes:
            timer.start()
        time.sleep(seconds)
        with self.lock:
            self.window = None
        window.stolen = stolen_since(ticks)
        for timer in probes:
            timer.join()
        return window

    def settle(self) -> None:
        """Wait until chats are as fast as without an attack, for SETTLED_S seconds at most."""
        end_s = time.monotonic() + SETTLED_S
        while time.monotonic() < end_s:
            window = Window()
            for _ in range(3):
                self._probe(window)
            if not window.failures and max(window.ttft_s) < 2 * self.calm_s:
                return
            time.sleep(0.5)

    def _probe(self, window: Window) -> None:
        start_s = time.perf_counter()
        with self._answer(self.chat_key, HELLO) as response:
            response.read()
            if response.status == 200:
                window.ttft_s.append(time.perf_counter() - start_s)
            else:
                window.failures.append(f"a chat: expected status 200, got {response.status}")

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
    """Latencies in an attack's window over those in its twin's, each at the 95th percentile."""

    ttft: float
    gap: float
    stolen: float
    """The larger stolen share of the two windows."""


def processor_ticks() -> list[int]:
    """The ticks of all processors since boot: user, nice, system, idle, wait, irq, softirq, stolen."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def stolen_since(before: list[int]) -> float:
    """The share of the processors' time that the host stole since these ticks."""
    ticks = [new - old for old, new in zip(before, processor_ticks(), strict=True)]
    return ticks[7] / max(1, sum(ticks))


def p95(values: list[float]) -> float:
    """The 95th percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[94]


@contextmanager
def attacked_server(folder: Path) -> Iterator[tuple[Server, Neighbour, list[str]]]:
    """`quire serve` with four keys: two for the neighbour, two for the attacker."""
    keys = folder / "keys.json"
    chat, stream, *attackers = (add_key(keys, name) for name in ("chat", "stream", "attacker", "second-attacker"))
    words = (str(smollm2_directory()), "--served-model-name", "m", "--memory", "3GiB", "--tool-format", "hermes")
    with started(folder, *words, "--keys-file", str(keys), module="quire serve") as server:
        neighbour = Neighbour(server.port, chat, stream)
        with neighbour.reading():
            neighbour.watch(WARM_S)
            neighbour.calm_s = p95(neighbour.watch(WARM_S).ttft_s)
            yield server, neighbour, attackers


def measure_round(port: int, neighbour: Neighbour, keys: list[str], name: str, seconds: float) -> Ratios:
    """Run one round: the attack, then its twin."""
    outcome, attacked = _window(port, neighbour, keys, name, seconds, ())
    twin = ("--twin", str(outcome.pop("requests")), str(outcome.pop("answer_tokens")))
    _, plain = _window(port, neighbour, keys, name, seconds, twin)
    stolen = max(attacked.stolen, plain.stolen)
    ratios = Ratios(p95(attacked.ttft_s) / p95(plain.ttft_s), p95(attacked.gap_s) / p95(plain.gap_s), stolen)
    say(
        f"  {name}: {outcome}, twin {twin[1:]}: chat {p95(attacked.ttft_s):.2f} / {p95(plain.ttft_s):.2f} s"
        f" = {ratios.ttft:.2f}, gap {p95(attacked.gap_s):.3f} / {p95(plain.gap_s):.3f} s = {ratios.gap:.2f}"
        f" (longest {max(attacked.gap_s):.2f}, {max(plain.gap_s):.2f}), {stolen:.1%} stolen"
    )
    for failure in (*attacked.failures[:3], *plain.failures[:3]):
        say(f"    {failure}")
    return ratios


def _window(
    port: int, neighbour: Neighbour, keys: list[str], name: str, seconds: float, twin: tuple[str, ...]
) -> tuple[dict[str, int], Window]:
    # A real attacker is another machine, so sending must not take processor time from the server.
    command = ["nice", "-n", "19", sys.executable, "-m", "proofs.findings.neighbours.attacks", str(port), name]
    command += [str(seconds + 1.0), *twin, *(["--"] if twin else []), *keys[: BODIES[name].num_keys]]
    neighbour.settle()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1.0)  # until the attack has begun
        window = neighbour.watch(seconds)
        output, _ = process.communicate(timeout=600)
    return json.loads(output.splitlines()[-1]), window


def _measure(proof: Proof, *kinds: str) -> None:
    """Measure the attacks whose names begin so, in turns with their twins; a quick run measures some of them."""
    rounds, seconds = proof.sized(quick=1, full=3), float(proof.sized(quick=6, full=20))
    names = [name for name in BODIES if name.startswith(kinds)]
    if not proof.is_full:
        always = [name for name in names if name in ALWAYS]
        names = [*always, proof.random.choice([name for name in names if name not in ALWAYS])]
    ratios = dict[str, list[Ratios]]()
    num_repeated = 0
    with attacked_server(proof.folder) as (server, neighbour, keys):
        for _ in range(rounds):
            for name in names:
                round_ratios = measure_round(server.port, neighbour, keys, name, seconds)
                while round_ratios.stolen > MAX_STOLEN and num_repeated < MAX_REPEATED:
                    num_repeated += 1
                    round_ratios = measure_round(server.port, neighbour, keys, name, seconds)
                ratios.setdefault(name, []).append(round_ratios)
    for name, rows in ratios.items():
        proof.report(TTFT + name, statistics.median(ratio.ttft for ratio in rows))
        proof.report(GAP + name, statistics.median(ratio.gap for ratio in rows))
    proof.report(f"neighbour_repeated_{kinds[0]}rounds", num_repeated)


@section("neighbours: schemas")
def schemas(proof: Proof) -> None:
    _measure(proof, "schema_")


@section("neighbours: grammars")
def grammars(proof: Proof) -> None:
    _measure(proof, "grammar_", "regex_", "choice_")


@section("neighbours: tools")
def tools(proof: Proof) -> None:
    _measure(proof, "tools_")


@section("neighbours: answers")
def answers(proof: Proof) -> None:
    _measure(proof, "answer_", "stop_", "logit_", "allowed_")


@section("neighbours: prompts")
def prompts(proof: Proof) -> None:
    _measure(proof, "prompt_", "body_")


@section("neighbours: the worst of all")
def worst(proof: Proof) -> None:
    """Of this run's attacks; a full run of some sections takes the others from the record."""
    figures = ((proof.before or {}).get("figures", {}) if proof.is_full else {}) | proof.figures
    ratios = {of: {name: figures[of + name] for name in BODIES if of + name in figures} for of in (TTFT, GAP)}
    missing = [name for name in BODIES if name not in ratios[GAP]] if proof.is_full else []
    proof.report("neighbour_attacks", len(ratios[GAP]))
    proof.none("neighbour_attacks_missing", missing)
    for key, of, bound in (("neighbour_ttft", TTFT, MAX_TTFT_RATIO), ("neighbour_gap", GAP, MAX_GAP_RATIO)):
        name = max(ratios[of], key=ratios[of].__getitem__)
        proof.at_most(key, ratios[of][name], bound, f"of {name}")
