"""A promise of the front page: the server is right about why a prompt missed.

`explain_wrong` constructs misses in a real `quire serve` with a small pool, two models and two tenants, knows of each
what the answer must be, and asks by `/v1/cache/explain`, or by running the request with `cache_explain`.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.record import say
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key
from tests.support.models.tiny_models import Tiny, make_directory

BLOCK = 32
NUM_BLOCKS = 64
"""Four sequences of 512 tokens: what the server below has room for."""
SLOW_TOKEN = 251
"""A step that feeds it takes long enough to be asked about."""
SIZES = ("--memory", "1GiB", "--max-model-len", "512", "--max-running", "4", "--max-step-tokens", "64")
FAULTS = {"QUIRE_TESTING": "1", "QUIRE_FAULTS": json.dumps([{"kind": "slow", "token": SLOW_TOKEN, "by": 150.0}])}
PATIENCE_S = 120.0


# -- what a miss must be told as ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the answer about a prompt must be."""

    prompt: list[int]
    reason: str
    cached_tokens: int = 0
    position: int | None = None


@dataclass
class Misses:
    """Constructs misses in a running server, each of prompts that nobody sent before."""

    server: Server
    mine: str
    theirs: str
    dice: Random
    wrong: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(10, 250) for _ in range(count)]

    def other(self, token: int) -> int:
        """Any token but this one."""
        return 10 + (token - 10 + self.dice.randrange(1, 240)) % 240

    def run(self, prompt: list[int], model: str = "one", **more: Any) -> Any:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
        return self._post("/v1/completions", body, self.mine)

    def _post(self, path: str, body: Any, key: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), {"x-api-key": key, "content-type": "application/json"})
            response = connection.getresponse()
            told = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {told}")
        return told

    def explained(self, prompt: list[int], key: str = "") -> Any:
        return self._post("/v1/cache/explain", {"model": "one", "prompt": prompt}, key or self.mine)

    def flush(self, touched: list[int]) -> None:
        """Use up the whole pool with other prompts, and keep one prefix in use meanwhile."""
        for at in range(NUM_BLOCKS // 15 + 2):
            self.run(self.tokens(15 * BLOCK + 5))
            if touched and at % 2:
                self.run([*touched, *self.tokens(3)])

    def prefix(self) -> list[int]:
        """Some whole blocks, perhaps none, that are cached now."""
        found = self.tokens(BLOCK * self.dice.randrange(4))
        if found:
            self.run([*found, 5])
        return found

    # Each returns what the server must say now of a prompt.

    def too_short(self) -> Expected:
        prefix = self.prefix()
        return Expected([*prefix, *self.tokens(self.dice.randint(1, BLOCK))], "too_short", len(prefix))

    def evicted(self) -> Expected:
        prefix, lost = self.prefix(), self.tokens(BLOCK * self.dice.randint(1, 3))
        self.run([*prefix, *lost, 5])
        self.flush(prefix)
        return Expected([*prefix, *lost, 5], "evicted", len(prefix))

    def diverged(self) -> Expected:
        prefix, block = self.prefix(), self.tokens(BLOCK)
        shared = self.dice.randint(1, BLOCK - 1)
        for at in {shared, self.dice.randint(0, shared)}:
            self.run([*prefix, *block[:at], self.other(block[at]), *self.tokens(BLOCK - at)])
        prompt = [*prefix, *block, *self.tokens(self.dice.randint(1, 60))]
        return Expected(prompt, "diverged", len(prefix), len(prefix) + shared)

    def first_seen(self) -> Expected:
        prefix, block = self.prefix(), self.tokens(BLOCK)
        if prefix and self.dice.random() < 0.5:
            self.run([*prefix, self.other(block[0]), *block[1:], 5])
        return Expected([*prefix, *block, 5], "first_seen", len(prefix))

    def other_namespace(self) -> Expected:
        prompt = self.tokens(BLOCK * self.dice.randint(1, 4) + 1)
        self.run(prompt, "two")
        return Expected(prompt, "other_namespace")

    def anothers(self) -> Expected:
        """Whatever one tenant has, another reads as first seen."""
        return Expected(self.dice.choice((self.diverged, self.evicted, self.first_seen))().prompt, "first_seen")

    # -- and what it does say ------------------------------------------------------------------------------------------

    def judge(self, kind: str) -> None:
        """Construct one miss of this kind, ask, and compare."""
        self.asked[kind] += 1
        if kind == "computing":
            said, expected = self.while_computing()
        else:
            expected = getattr(self, kind)()
            said = self.explained(expected.prompt, self.theirs if kind == "anothers" else self.mine)
        right = self.is_right(said, expected)
        if right and kind not in ("computing", "anothers", "other_namespace"):
            right = self.is_told_beside_the_answer(expected)
        if not right:
            self.wrong[kind] += 1
            say(f"  {kind}: expected {expected.reason} {expected.cached_tokens} {expected.position}, got {said}")

    def is_right(self, said: Any, expected: Expected) -> bool:
        difference = said["difference"] or {}
        at = expected.position
        return (
            (said["reason"], said["cached_tokens"]) == (expected.reason, expected.cached_tokens)
            and said["prompt_tokens"] == len(expected.prompt)
            and difference.get("position") == at
            and (at is None or difference["token_id"] == expected.prompt[at] != difference["cached_token_id"])
            and (said["evicted_seconds_ago"] is not None) == (expected.reason == "evicted")
            and (said["other_model"] == "two") == (expected.reason == "other_namespace")
        )

    def is_told_beside_the_answer(self, expected: Expected) -> bool:
        """The same prompt, run: what it says of its admission must agree."""
        details = self.run(expected.prompt, cache_explain=True)["usage"]["prompt_tokens_details"]
        (miss,) = details["cache_misses"]
        return bool(
            (miss["reason"], miss["cached_tokens"], miss["position"])
            == (expected.reason, expected.cached_tokens, expected.position)
        )

    def while_computing(self) -> tuple[Any, Expected]:
        """Ask about a prompt of several slow steps while they run, then leave."""
        prompt = [SLOW_TOKEN if at % BLOCK == 1 else token for at, token in enumerate(self.tokens(480))]
        before = self.explained(prompt)["reason"]  # its first tokens may be like another's
        with self.running(prompt):
            deadline_s = time.monotonic() + PATIENCE_S
            while (said := self.explained(prompt))["reason"] == before and not said["cached_tokens"]:
                if time.monotonic() > deadline_s:
                    break
        # How far it came is its own business; a whole number of blocks, and not all of them.
        cached = said["cached_tokens"] if said["cached_tokens"] in range(0, 480 - BLOCK, BLOCK) else -1
        return said, Expected(prompt, "computing", cached)

    @contextmanager
    def running(self, prompt: list[int]) -> Iterator[None]:
        """While this prompt is computed; leaving ends it."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        body = {"model": "one", "prompt": prompt, "max_tokens": 1}
        headers = {"x-api-key": self.mine, "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        try:
            yield
        finally:
            connection.close()


KINDS = ("too_short", "diverged", "first_seen", "other_namespace", "anothers", "evicted", "computing")


@section("promises: misses explained")
def misses_explained(proof: Proof) -> None:
    """Misses of every reason, in turn."""
    count, seed = proof.sized(quick=42, full=203), time.time_ns()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys.json"
        mine, theirs = add_key(keys, "mine"), add_key(keys, "theirs")
        tiny = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
        models = [str(make_directory(folder / one, tiny=tiny)) for one in ("one", "two")]
        words = (*models, *SIZES, "--threads", "1", "--keys-file", str(keys))
        with started(folder, *words, module="quire serve", environment=FAULTS) as server:
            misses = Misses(server, mine, theirs, Random(seed))
            for at in range(count):
                misses.judge(KINDS[at % len(KINDS)])
    wrong = misses.wrong.total()
    if wrong:
        say(f"  seed {seed}")
    for kind in KINDS:
        proof.at_least(f"explained_{kind}", misses.asked[kind], 1)
    proof.equals("explain_wrong", wrong, 0, f"of {count}")
