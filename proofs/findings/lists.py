"""Sections `list_cost` and `logprobs_size`: what one key's long lists cost another key, and how large answers can get.

`list_cost`: a real `quire serve` with two keys. The key "neighbour" runs 32 sequences (four streams of eight answers).
They are either plain or have lists: nearly all tokens of the vocabulary are stop tokens, but no sequence may stop for
200 tokens. The key "person" streams one answer meanwhile. The row is the median over rounds of its gap between
tokens beside lists, over its gap beside plain sequences.

`logprobs_size`: the size of an answer with log-probabilities just under the limit, and whether the server refuses a
request just over the limit before it computes anything.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from benchmarks.record import ROOT, say
from benchmarks.test_model import smollm2_directory
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.http.limits import MAX_ANSWER_LOGPROBS
from quire.client.request.params import MAX_ANSWERS, MAX_LOGPROBS

MAX_GAP_RATIO = 1.3
MAX_ANSWER_MB = 32
NUM_REQUESTS = 4
MIN_TOKENS = 200
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to a server with one key."""

    server: Server
    key: str
    model: str

    def send(self, **fields: Any) -> HTTPConnection:
        """Send a completion over a new connection."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        connection.request("POST", "/v1/completions", json.dumps({"model": self.model, **fields}), headers)
        return connection


# -- lists of tokens --------------------------------------------------------------------------------------------------


@section("list_cost")
def list_cost(proof: Proof) -> None:
    """Measure both kinds in each round; they go first in turns."""
    num_rounds, num_gaps = proof.sized(quick=3, full=9), proof.sized(quick=10, full=30)
    with serving() as (neighbour, person):
        num_tokens = _vocabulary_size(person)
        lists = {"stop_token_ids": list(range(1, num_tokens)), "min_tokens": MIN_TOKENS, "ignore_eos": True}
        kinds: dict[str, dict[str, Any]] = {"plain": {"ignore_eos": True}, "lists": lists}
        _gap(person, num_gaps)  # warm-up
        alone_s, pairs = _gap(person, num_gaps), []
        for number in range(num_rounds):
            order = sorted(kinds, reverse=bool(number % 2))
            gaps_s = {kind: _gap_beside(neighbour, person, kinds[kind], num_gaps) for kind in order}
            say(f"  beside 32 plain {gaps_s['plain']:.3f} s, beside 32 with lists {gaps_s['lists']:.3f} s")
            pairs.append((gaps_s["lists"], gaps_s["plain"]))
    proof.report("gap_alone_s", alone_s)
    proof.report("gap_beside_plain_s", median(plain_s for _, plain_s in pairs))
    proof.report("gap_beside_lists_s", median(lists_s for lists_s, _ in pairs))
    _report_ratio(proof, "list_cost", pairs, max_ratio=MAX_GAP_RATIO)


@contextmanager
def serving() -> Iterator[tuple[Client, Client]]:
    """A real server; yields a client with the neighbour's key, and one with the person's key."""
    model = smollm2_directory()
    with TemporaryDirectory(prefix="quire-lists-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        keys = folder / "keys.json"
        secrets = [_add_key(name, keys) for name in ("neighbour", "person")]
        words = (str(model), "--memory", "4GiB", "--max-model-len", "2048", "--keys-file", str(keys))
        with started(folder, *words, module="quire serve") as server:
            neighbour, person = (Client(server, key, model.name) for key in secrets)
            yield neighbour, person


def _add_key(name: str, keys: Path) -> str:
    command = [sys.executable, "-m", "quire", "keys", "add", name, "--keys-file", str(keys)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return next(word for word in process.stdout.split() if word.startswith("quire-"))


def _vocabulary_size(client: Client) -> int:
    """Read from the error message for a token id that is too large."""
    connection = client.send(prompt="x", max_tokens=1, stop_token_ids=[1 << 30])
    message = json.loads(connection.getresponse().read())["error"]["message"]
    connection.close()
    return int(message.partition("from 0 to ")[2].partition(",")[0]) + 1


def _gap_beside(neighbour: Client, person: Client, fields: dict[str, Any], num_gaps: int) -> float:
    """The person's gap in seconds while all of the neighbour's sequences run."""
    body = {"max_tokens": 2 * MIN_TOKENS, "n": MAX_ANSWERS, "stream": True, "return_token_ids": True, **fields}
    loads = [Load(neighbour, prompt=f"Story number {number}:", **body) for number in range(NUM_REQUESTS)]
    try:
        for load in loads:
            load.wait_until_running()
        gap_s = _gap(person, num_gaps)
        if not all(load.is_running for load in loads):
            raise RuntimeError("a neighbour's stream ended before the person's: its cost was not measured to the end")
        return gap_s
    finally:
        for load in loads:
            load.close()
        _wait_until_free(person.server)


class Load:
    """One of the neighbour's streams, which a thread reads."""

    def __init__(self, client: Client, **fields: Any) -> None:
        self._connection = client.send(**fields)
        self._begun = Event()
        self._ended = Event()
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._begun.is_set() and not self._ended.is_set()

    def wait_until_running(self) -> None:
        """Wait until each of its answers has a token."""
        if not self._begun.wait(PATIENCE_S) or self._ended.is_set():
            raise RuntimeError("a neighbour's stream did not begin, or ended at once")

    def close(self) -> None:
        """Close the connection in the middle of the stream."""
        with suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._connection.close()

    def _read(self) -> None:
        indices: set[int] = set()
        with suppress(OSError, ValueError):
            response = self._connection.getresponse()
            while response.status == 200 and (line := response.readline()):
                indices |= {choice["index"] for choice in _event(line).get("choices", ())}
                if len(indices) == MAX_ANSWERS:
                    self._begun.set()
        self._ended.set()
        self._begun.set()


def _event(line: bytes) -> dict[str, Any]:
    data = line.removeprefix(b"data: ").strip()
    event: dict[str, Any] = json.loads(data) if data.startswith(b"{") else {}
    return event


def _gap(person: Client, num_gaps: int) -> float:
    """The median time in seconds between two tokens of one stream."""
    body = {"prompt": "The weather today is", "max_tokens": num_gaps + 1, "ignore_eos": True, "stream": True}
    connection = person.send(**body, return_token_ids=True)
    response, times_s = connection.getresponse(), []
    while line := response.readline():
        if any(choice.get("token_ids") for choice in _event(line).get("choices", ())):
            times_s.append(time.monotonic())
    connection.close()
    if len(times_s) < num_gaps // 2:
        raise RuntimeError(f"expected {num_gaps + 1} events with tokens, got {len(times_s)}")
    return median(b - a for a, b in pairwise(times_s))


def _wait_until_free(server: Server) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while server.admin("/stats")["num_open_requests"]:
        if time.monotonic() > deadline_s:
            raise RuntimeError("requests are still open whose clients have disconnected")
        time.sleep(0.05)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@section("logprobs_size")
def logprobs_size(proof: Proof) -> None:
    """Measure the largest answer that is allowed, and the smallest that is refused."""
    max_tokens = MAX_ANSWER_LOGPROBS // (MAX_ANSWERS * (1 + MAX_LOGPROBS))
    with serving() as (_, person):
        num_bytes, _ = _request_logprobs(person, max_tokens)
        num_before = _num_computed(person.server)
        _, status = _request_logprobs(person, max_tokens + 1)
        num_computed = _num_computed(person.server) - num_before
    proof.at_most("largest_answer_mb", num_bytes / 1e6, MAX_ANSWER_MB)
    proof.holds("oversized_refused", status == 400, "with status 400")
    proof.equals("oversized_computed", num_computed, 0)


def _request_logprobs(person: Client, num_tokens: int) -> tuple[int, int]:
    """Bytes and status of the answer to a prompt of so many tokens, with as many log-probabilities as possible."""
    ids = [100 + 17 * position % 40_000 for position in range(num_tokens)]
    connection = person.send(prompt=ids, max_tokens=1, n=MAX_ANSWERS, prompt_logprobs=MAX_LOGPROBS)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return len(data), response.status


def _num_computed(server: Server) -> int:
    return sum(int(model["engine"]["num_step_tokens"]) for model in server.admin("/stats")["models"])


def _report_ratio(proof: Proof, key: str, pairs: Sequence[tuple[float, float]], max_ratio: float) -> None:
    """Report the median of the rounds' ratios, and the range of all."""
    ratios = [a / b for a, b in pairs]
    proof.at_most(key, median(ratios), max_ratio)
    proof.report(f"{key}_spread", max(ratios) - min(ratios))
