"""Section `grammars after a crash`: how long a kill of the worker holds another key up, with grammars under way.

Finding A3: four requests of eight answers each, in grammars whose masks grow with every token; `kill -9` of the worker,
and every token of every answer was followed again in one step. Another key streams meanwhile, and its longest gap
behind the kill is compared with that behind a kill beside as many plain answers of equal length.

A3 itself is refused at the door. So the attack has it behind a text that it forces, longer than the door looks ahead;
it costs the attacker no step. Rounds of both kinds in turns; the ratio of a round is judged by `rounds`.
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
HIDDEN = f'start: "{"qz" * 60}" e\ne: e e | e e e | "a"'
NO_END = {"0": -100, "2": -100}
"""Of the test model: its answers end when the grammar does."""
NUM_ATTACKS, NUM_ANSWERS, MAX_TOKENS = 4, 8, 1500
UNDER_WAY_S = 8.0
"""How long attackers' answers have run when the worker is killed."""
BEHIND_S = 5.0
"""How long gaps are looked at once the stream goes on."""
BACK_S = 120.0
"""By then it must."""
MAX_GAP_RATIO = 1.5


def chat(key: str, **fields: Any) -> tuple[bytes, dict[str, str]]:
    """The body and headers of a request."""
    body = {"messages": [{"role": "user", "content": "Tell a long story"}], "temperature": 0.0, **fields}
    return json.dumps(body).encode(), {"authorization": f"Bearer {key}", "content-type": "application/json"}


@dataclass(slots=True)
class Streams:
    """Requests that are open until they are left."""

    port: int
    lines_s: list[float] = field(default_factory=list)
    """When each line of the watched stream came."""
    num_refused: int = 0
    _open: list[HTTPConnection] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, key: str, *, is_watched: bool = False, **fields: Any) -> None:
        """One more, in a thread of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        self._open.append(connection)
        thread = threading.Thread(target=self._read, args=(connection, key, is_watched, fields), daemon=True)
        self._threads.append(thread)
        thread.start()

    def leave(self) -> None:
        """All clients go."""
        for connection in self._open:
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
        streams.leave()


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


def gap_behind_a_kill(server: Server, keys: Keys, **attack: Any) -> float:
    """The longest gap of the other key's stream, from the kill on, in seconds."""
    with streaming(server.port) as streams:
        streams.begin(keys.other, is_watched=True, max_tokens=2000, ignore_eos=True)
        for _ in range(NUM_ATTACKS):
            streams.begin(keys.attacker, n=NUM_ANSWERS, max_tokens=MAX_TOKENS, **attack)
        time.sleep(UNDER_WAY_S)
        killed_s = time.monotonic()
        os.kill(worker_of(server), signal.SIGKILL)
        while streams.lines_s[-1:] < [killed_s] and time.monotonic() < killed_s + BACK_S:
            time.sleep(0.1)
        time.sleep(BEHIND_S)
        ended_s = time.monotonic()
        if streams.num_refused or not streams.lines_s:
            raise RuntimeError(f"{streams.num_refused} requests were refused; {len(streams.lines_s)} lines came")
        seen = [max([one for one in streams.lines_s if one <= killed_s], default=killed_s)]
        seen += [one for one in streams.lines_s if one > killed_s]
    return max(after - before for before, after in zip(seen, [*seen[1:], ended_s], strict=True))


@section("grammars after a crash")
def grammars_after_a_crash(proof: Proof) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        keys = Keys(add_key(path, "attacker"), add_key(path, "other"))
        with serving(keys=path) as server:
            proof.equals("grammar_refused_at_the_door", refused(server, keys), 1, "A3 as it was found")

            def measure() -> list[float]:
                plain = gap_behind_a_kill(server, keys, ignore_eos=True)
                grammar = gap_behind_a_kill(server, keys, grammar=HIDDEN, logit_bias=NO_END)
                say(f"    plain {plain:.2f} s, grammars {grammar:.2f} s")
                return [grammar / plain]

            (ratios,) = measured_ratios(measure, None if proof.is_full else 2)
            judge_ratio(proof, "grammar_crash_gap", ratios, at_most=MAX_GAP_RATIO)


def refused(server: Server, keys: Keys) -> int:
    """Whether A3 itself comes in."""
    with streaming(server.port) as streams:
        streams.begin(keys.attacker, grammar=A3, max_tokens=1)
        streams._threads[0].join(60)
        return streams.num_refused
