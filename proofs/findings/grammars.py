"""Section `grammars after a crash`: how long another key's stream stops after a kill of the worker, beside grammars.

Finding A3: four requests have eight answers each, in grammars whose masks take more work with every token. After a
`kill -9` of the worker, one step advanced the grammars again over all tokens of all answers. Another key reads a
stream, and its longest gap after the kill is compared with the gap beside as many plain answers of equal length.

The API refuses the grammar of A3 itself. So the attack puts it after a fixed text that is longer than the API's check
looks ahead; fixed text costs the attacker no step. The two kinds of rounds alternate; `rounds` judges their ratio.
"""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.record import say
from benchmarks.rounds import measured_ratios
from proofs.api.load import Server, children_of
from proofs.findings.access import serving
from proofs.framework.proof import Proof, section
from proofs.framework.rounds import judge_ratio
from quire.api.access.keys import add_key

A3 = 'start: e\ne: e e | e e e | "a"'
HIDDEN_A3 = f'start: "{"qz" * 60}" e\ne: e e | e e e | "a"'
NO_END = {"0": -100, "2": -100}
"""Forbids the test model's end tokens, so that only the end of the grammar ends an answer."""
NUM_ATTACKS, NUM_ANSWERS, MAX_TOKENS = 4, 8, 1500
BEFORE_KILL_S = 8.0
"""How long the attacker's answers run before the worker is killed."""
AFTER_KILL_S = 5.0
"""How long gaps are measured once the stream continues."""
MAX_OUTAGE_S = 120.0
"""How long the stream may stop after the kill."""
MAX_GAP_RATIO = 1.5


def chat(key: str, **fields: Any) -> tuple[bytes, dict[str, str]]:
    """The body and headers of a request."""
    body = {"messages": [{"role": "user", "content": "Tell a long story"}], "temperature": 0.0, **fields}
    return json.dumps(body).encode(), {"authorization": f"Bearer {key}", "content-type": "application/json"}


@dataclass(slots=True)
class Streams:
    """Streaming requests that stay open until `close`."""

    port: int
    lines_s: list[float] = field(default_factory=list)
    """The arrival time of each line of the watched stream."""
    num_refused: int = 0
    _connections: list[HTTPConnection] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self, key: str, *, is_watched: bool = False, **fields: Any) -> None:
        """Send one more request, and read its stream in a new thread."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        self._connections.append(connection)
        thread = threading.Thread(target=self._read, args=(connection, key, is_watched, fields), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Close all connections, and wait for their threads."""
        for connection in self._connections:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(2)
        for thread in self._threads:
            thread.join(60)

    def _read(self, connection: HTTPConnection, key: str, is_watched: bool, fields: dict[str, Any]) -> None:
        with suppress(OSError, HTTPException, ValueError):
            connection.request("POST", "/v1/chat/completions", *chat(key, stream=True, **fields))
            response = connection.getresponse()
            self.num_refused += response.status != 200
            while line := response.readline():
                if is_watched and line.startswith(b"data:"):
                    self.lines_s.append(time.monotonic())


@contextmanager
def streaming(port: int) -> Iterator[Streams]:
    streams = Streams(port)
    try:
        yield streams
    finally:
        streams.close()


@dataclass(frozen=True, slots=True)
class Keys:
    attacker: str
    other: str


def worker_of(server: Server) -> int:
    """The process that owns the model."""
    for pid in children_of(server.pid):
        with suppress(OSError):
            if b"quire.worker.child.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise RuntimeError("the server has no worker")


def gap_after_a_kill(server: Server, keys: Keys, **attack: Any) -> float:
    """Kill the worker beside an attack; returns the longest gap of the other key's stream since then, in seconds."""
    with streaming(server.port) as streams:
        streams.open(keys.other, is_watched=True, max_tokens=2000, ignore_eos=True)
        for _ in range(NUM_ATTACKS):
            streams.open(keys.attacker, n=NUM_ANSWERS, max_tokens=MAX_TOKENS, **attack)
        time.sleep(BEFORE_KILL_S)
        killed_s = time.monotonic()
        os.kill(worker_of(server), signal.SIGKILL)
        while streams.lines_s[-1:] < [killed_s] and time.monotonic() < killed_s + MAX_OUTAGE_S:
            time.sleep(0.1)
        time.sleep(AFTER_KILL_S)
        end_s = time.monotonic()
        if streams.num_refused or not streams.lines_s:
            raise RuntimeError(f"{streams.num_refused} requests were refused, {len(streams.lines_s)} lines came")
        times_s = [max([line_s for line_s in streams.lines_s if line_s <= killed_s], default=killed_s)]
        times_s += [line_s for line_s in streams.lines_s if line_s > killed_s]
    return max(after - before for before, after in zip(times_s, [*times_s[1:], end_s], strict=True))


@section("grammars after a crash")
def grammars_after_a_crash(proof: Proof) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        keys = Keys(add_key(path, "attacker"), add_key(path, "other"))
        with serving(keys=path) as server:
            proof.equals("grammar_refused_at_the_door", num_refused(server, keys), 1, "A3 as it was reported")

            def measure() -> list[float]:
                plain_s = gap_after_a_kill(server, keys, ignore_eos=True)
                grammar_s = gap_after_a_kill(server, keys, grammar=HIDDEN_A3, logit_bias=NO_END)
                say(f"    plain {plain_s:.2f} s, grammars {grammar_s:.2f} s")
                return [grammar_s / plain_s]

            (ratios,) = measured_ratios(measure, None if proof.is_full else 2)
            judge_ratio(proof, "grammar_crash_gap", ratios, at_most=MAX_GAP_RATIO)


def num_refused(server: Server, keys: Keys) -> int:
    """1 if the server refuses the grammar of A3 itself, else 0."""
    with streaming(server.port) as streams:
        streams.open(keys.attacker, grammar=A3, max_tokens=1)
        streams._threads[0].join(60)
        return streams.num_refused
