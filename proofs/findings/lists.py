"""Sections `list_cost` and `logprobs_size`: what long lists of tokens and log-probabilities of prompts cost others.

`list_cost`: a real `quire serve` with two keys. One key runs 32 sequences (four streams of eight answers), plain ones
or such that name all but one token of the vocabulary as stop tokens and may not stop for 200 tokens. The other key
streams one answer beside them: the figure is its gap between tokens beside the lists over that beside the plain ones,
the median over rounds that take turns.

`logprobs_size`: the size of a real answer just under the limit, and whether one just over it is refused before
anything is computed.
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
class KeyHolder:
    """A server as one key sees it."""

    server: Server
    key: str
    model: str

    def send(self, **fields: Any) -> HTTPConnection:
        """A completion on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        connection.request("POST", "/v1/completions", json.dumps({"model": self.model, **fields}), headers)
        return connection


# -- lists of tokens --------------------------------------------------------------------------------------------------


@section("list_cost")
def list_cost(proof: Proof) -> None:
    """Rounds of both kinds in turn, each beginning with the other."""
    num_rounds, num_gaps = proof.sized(quick=3, full=9), proof.sized(quick=10, full=30)
    with served() as (neighbour, person):
        size = _vocabulary_size(person)
        lists = {"stop_token_ids": list(range(1, size)), "min_tokens": MIN_TOKENS, "ignore_eos": True}
        kinds: dict[str, dict[str, Any]] = {"plain": {"ignore_eos": True}, "lists": lists}
        _gap(person, num_gaps)  # the first of all pays for what is loaded late
        alone, pairs = _gap(person, num_gaps), []
        for number in range(num_rounds):
            order = sorted(kinds, reverse=bool(number % 2))
            gaps = {kind: _gap_beside(neighbour, person, kinds[kind], num_gaps) for kind in order}
            say(f"  beside 32 plain {gaps['plain']:.3f} s, beside 32 with lists {gaps['lists']:.3f} s")
            pairs.append((gaps["lists"], gaps["plain"]))
    proof.report("gap_alone_s", alone)
    proof.report("gap_beside_plain_s", median(plain for _, plain in pairs))
    proof.report("gap_beside_lists_s", median(lists for lists, _ in pairs))
    _report_ratio(proof, "list_cost", pairs, MAX_GAP_RATIO)


@contextmanager
def served() -> Iterator[tuple[KeyHolder, KeyHolder]]:
    """A real server with two keys: a neighbour's and a person's."""
    model = smollm2_directory()
    with TemporaryDirectory(prefix="quire-lists-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        keys = folder / "keys.json"
        made = [_key(who, keys) for who in ("neighbour", "person")]
        words = (str(model), "--memory", "4GiB", "--max-model-len", "2048", "--keys-file", str(keys))
        with started(folder, *words, module="quire serve") as server:
            neighbour, person = (KeyHolder(server, key, model.name) for key in made)
            yield neighbour, person


def _key(who: str, keys: Path) -> str:
    words = [sys.executable, "-m", "quire", "keys", "add", who, "--keys-file", str(keys)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return next(word for word in done.stdout.split() if word.startswith("quire-"))


def _vocabulary_size(holder: KeyHolder) -> int:
    """As the refusal of an id that is in no vocabulary tells it."""
    connection = holder.send(prompt="x", max_tokens=1, stop_token_ids=[1 << 30])
    message = json.loads(connection.getresponse().read())["error"]["message"]
    connection.close()
    return int(message.partition("from 0 to ")[2].partition(",")[0]) + 1


def _gap_beside(neighbour: KeyHolder, person: KeyHolder, fields: dict[str, Any], num_gaps: int) -> float:
    """The person's gap while the neighbour's sequences run from before to after."""
    asked = {"max_tokens": 2 * MIN_TOKENS, "n": MAX_ANSWERS, "stream": True, "return_token_ids": True, **fields}
    loads = [Load(neighbour, prompt=f"Story number {number}:", **asked) for number in range(NUM_REQUESTS)]
    try:
        for load in loads:
            load.wait_until_it_runs()
        gap = _gap(person, num_gaps)
        if not all(load.is_running for load in loads):
            raise RuntimeError("a neighbour's stream ended before the person's did: nothing was measured beside it")
        return gap
    finally:
        for load in loads:
            load.close()
        _wait_until_free(person.server)


class Load:
    """One of the neighbour's streams, read as it comes."""

    def __init__(self, holder: KeyHolder, **fields: Any) -> None:
        self._connection = holder.send(**fields)
        self._begun = Event()
        self._ended = Event()
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._begun.is_set() and not self._ended.is_set()

    def wait_until_it_runs(self) -> None:
        """All its answers have a token."""
        if not self._begun.wait(PATIENCE_S) or self._ended.is_set():
            raise RuntimeError("a neighbour's stream did not begin")

    def close(self) -> None:
        """Hang up in the middle."""
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
    told: dict[str, Any] = json.loads(data) if data.startswith(b"{") else {}
    return told


def _gap(person: KeyHolder, num_gaps: int) -> float:
    """The median time between two tokens of one stream."""
    asked = {"prompt": "The weather today is", "max_tokens": num_gaps + 1, "ignore_eos": True, "stream": True}
    connection = person.send(**asked, return_token_ids=True)
    response, times = connection.getresponse(), []
    while line := response.readline():
        if any(choice.get("token_ids") for choice in _event(line).get("choices", ())):
            times.append(time.monotonic())
    connection.close()
    if len(times) < num_gaps // 2:
        raise RuntimeError(f"{num_gaps + 1} tokens were asked for, {len(times)} came one by one")
    return median(late - early for early, late in pairwise(times))


def _wait_until_free(server: Server) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while server.admin("/stats")["num_open_requests"]:
        if time.monotonic() > deadline_s:
            raise RuntimeError("streams that hung up are still inside")
        time.sleep(0.05)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@section("logprobs_size")
def logprobs_size(proof: Proof) -> None:
    """The largest answer that is given, and the smallest that is not."""
    most = MAX_ANSWER_LOGPROBS // (MAX_ANSWERS * (1 + MAX_LOGPROBS))
    with served() as (_, person):
        size, _ = _scored(person, most)
        before = _num_computed(person.server)
        _, status = _scored(person, most + 1)
        num_computed = _num_computed(person.server) - before
    proof.at_most("largest_answer_mb", size / 1e6, MAX_ANSWER_MB)
    proof.holds("oversized_refused", status == 400, "with status 400")
    proof.equals("oversized_computed", num_computed, 0)


def _scored(person: KeyHolder, num_tokens: int) -> tuple[int, int]:
    """Bytes and status of an answer about a prompt of so many tokens, in its longest form."""
    ids = [100 + 17 * at % 40_000 for at in range(num_tokens)]
    connection = person.send(prompt=ids, max_tokens=1, n=MAX_ANSWERS, prompt_logprobs=MAX_LOGPROBS)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return len(data), response.status


def _num_computed(server: Server) -> int:
    return sum(int(model["engine"]["num_step_tokens"]) for model in server.admin("/stats")["models"])


def _report_ratio(proof: Proof, key: str, pairs: Sequence[tuple[float, float]], limit: float) -> None:
    """The median of the rounds' ratios, and how far apart they were."""
    ratios = [one / other for one, other in pairs]
    proof.at_most(key, median(ratios), limit)
    proof.report(f"{key}_spread", max(ratios) - min(ratios))
