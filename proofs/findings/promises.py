"""A promise of the README: the server gives the right reason why a prompt missed the prefix cache.

The result `explain_wrong` counts wrong reasons. We construct misses in a real `quire serve` with a small pool, two
models and two tenants, and check the reasons from `/v1/cache/explain` and from requests with `cache_explain`.
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
"""A step with this token is slow, so that its prompt can be explained while it is computed."""
SIZES = ("--memory", "1GiB", "--max-model-len", "512", "--max-running", "4", "--max-step-tokens", "64")
FAULTS = {"QUIRE_TESTING": "1", "QUIRE_FAULTS": json.dumps([{"kind": "slow", "token": SLOW_TOKEN, "by": 150.0}])}  # ms
TIMEOUT_S = 120.0


# -- expected reasons --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """A prompt, and what the explanation of its miss must be."""

    prompt: list[int]
    reason: str
    cached_tokens: int = 0
    position: int | None = None


@dataclass
class Misses:
    """Constructs misses in a running server, each with new random prompts."""

    server: Server
    own_key: str
    other_key: str
    random: Random
    wrong: Counter[str] = field(default_factory=Counter)
    num_constructed: Counter[str] = field(default_factory=Counter)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(10, 250) for _ in range(count)]

    def different(self, token: int) -> int:
        """A random token that is not this one."""
        return 10 + (token - 10 + self.random.randrange(1, 240)) % 240

    def run(self, prompt: list[int], model: str = "one", **more: Any) -> Any:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, **more}
        return self._post("/v1/completions", body, self.own_key)

    def _post(self, path: str, body: Any, key: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"x-api-key": key, "content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: expected status 200, got {response.status}: {answer}")
        return answer

    def explain(self, prompt: list[int], key: str = "") -> Any:
        return self._post("/v1/cache/explain", {"model": "one", "prompt": prompt}, key or self.own_key)

    def flush(self, prefix: list[int]) -> None:
        """Use up the whole pool with other prompts, and use one prefix often enough that it stays cached."""
        for number in range(NUM_BLOCKS // 15 + 2):
            self.run(self.tokens(15 * BLOCK + 5))
            if prefix and number % 2:
                self.run([*prefix, *self.tokens(3)])

    def cached_prefix(self) -> list[int]:
        """Cache up to three whole blocks, and return their tokens."""
        tokens = self.tokens(BLOCK * self.random.randrange(4))
        if tokens:
            self.run([*tokens, 5])
        return tokens

    # Each method, named after a reason (`anothers`: another tenant's), makes a miss; it returns the right explanation.

    def too_short(self) -> Expected:
        prefix = self.cached_prefix()
        return Expected([*prefix, *self.tokens(self.random.randint(1, BLOCK))], "too_short", len(prefix))

    def evicted(self) -> Expected:
        prefix, lost = self.cached_prefix(), self.tokens(BLOCK * self.random.randint(1, 3))
        self.run([*prefix, *lost, 5])
        self.flush(prefix)
        return Expected([*prefix, *lost, 5], "evicted", len(prefix))

    def diverged(self) -> Expected:
        prefix, block = self.cached_prefix(), self.tokens(BLOCK)
        shared = self.random.randint(1, BLOCK - 1)
        for i in {shared, self.random.randint(0, shared)}:
            self.run([*prefix, *block[:i], self.different(block[i]), *self.tokens(BLOCK - i)])
        prompt = [*prefix, *block, *self.tokens(self.random.randint(1, 60))]
        return Expected(prompt, "diverged", len(prefix), len(prefix) + shared)

    def first_seen(self) -> Expected:
        prefix, block = self.cached_prefix(), self.tokens(BLOCK)
        if prefix and self.random.random() < 0.5:
            self.run([*prefix, self.different(block[0]), *block[1:], 5])
        return Expected([*prefix, *block, 5], "first_seen", len(prefix))

    def other_namespace(self) -> Expected:
        prompt = self.tokens(BLOCK * self.random.randint(1, 4) + 1)
        self.run(prompt, "two")
        return Expected(prompt, "other_namespace")

    def anothers(self) -> Expected:
        """A prompt that one tenant has sent must be reported as first_seen to another tenant."""
        return Expected(self.random.choice((self.diverged, self.evicted, self.first_seen))().prompt, "first_seen")

    # -- explanations of the server ------------------------------------------------------------------------------------

    def judge(self, kind: str) -> None:
        """Construct one miss of this kind, and compare the server's explanation with the expected one."""
        self.num_constructed[kind] += 1
        if kind == "computing":
            explanation, expected = self.while_computing()
        else:
            expected = getattr(self, kind)()
            explanation = self.explain(expected.prompt, self.other_key if kind == "anothers" else self.own_key)
        is_right = self.is_right(explanation, expected)
        if is_right and kind not in ("computing", "anothers", "other_namespace"):
            is_right = self.is_right_in_usage(expected)
        if not is_right:
            self.wrong[kind] += 1
            say(f"  {kind}: expected {expected.reason} {expected.cached_tokens} {expected.position}, got {explanation}")

    def is_right(self, explanation: Any, expected: Expected) -> bool:
        difference = explanation["difference"] or {}
        index = expected.position
        return (
            (explanation["reason"], explanation["cached_tokens"]) == (expected.reason, expected.cached_tokens)
            and explanation["prompt_tokens"] == len(expected.prompt)
            and difference.get("position") == index
            and (index is None or difference["token_id"] == expected.prompt[index] != difference["cached_token_id"])
            and (explanation["evicted_seconds_ago"] is not None) == (expected.reason == "evicted")
            and (explanation["other_model"] == "two") == (expected.reason == "other_namespace")
        )

    def is_right_in_usage(self, expected: Expected) -> bool:
        """Run the prompt: the miss in the answer's `usage` must be the expected one as well."""
        details = self.run(expected.prompt, cache_explain=True)["usage"]["prompt_tokens_details"]
        (miss,) = details["cache_misses"]
        return bool(
            (miss["reason"], miss["cached_tokens"], miss["position"])
            == (expected.reason, expected.cached_tokens, expected.position)
        )

    def while_computing(self) -> tuple[Any, Expected]:
        """Explain a prompt of several slow steps while they run, then disconnect."""
        prompt = [SLOW_TOKEN if i % BLOCK == 1 else token for i, token in enumerate(self.tokens(480))]
        old_reason = self.explain(prompt)["reason"]  # by chance, its first tokens may be those of another prompt
        with self.running(prompt):
            deadline_s = time.monotonic() + TIMEOUT_S
            while (explanation := self.explain(prompt))["reason"] == old_reason and not explanation["cached_tokens"]:
                if time.monotonic() > deadline_s:
                    break
        # Any whole number of blocks may be computed so far, but not all of them.
        cached = explanation["cached_tokens"]
        return explanation, Expected(prompt, "computing", cached if cached in range(0, 480 - BLOCK, BLOCK) else -1)

    @contextmanager
    def running(self, prompt: list[int]) -> Iterator[None]:
        """Compute this prompt while the `with` statement runs, then cancel it by disconnecting."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=TIMEOUT_S)
        body = {"model": "one", "prompt": prompt, "max_tokens": 1}
        headers = {"x-api-key": self.own_key, "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        try:
            yield
        finally:
            connection.close()


KINDS = ("too_short", "diverged", "first_seen", "other_namespace", "anothers", "evicted", "computing")


@section("promises: misses explained")
def misses_explained(proof: Proof) -> None:
    """Construct misses of every reason, in turn."""
    count, seed = proof.sized(quick=42, full=203), time.time_ns()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys.json"
        own_key, other_key = add_key(keys, "mine"), add_key(keys, "theirs")
        tiny = Tiny(hidden=128, intermediate=128, num_layers=2, metadata={"llama.context_length": 512})
        models = [str(make_directory(folder / model, tiny=tiny)) for model in ("one", "two")]
        arguments = (*models, *SIZES, "--threads", "1", "--keys-file", str(keys))
        with started(folder, *arguments, module="quire serve", environment=FAULTS) as server:
            misses = Misses(server, own_key, other_key, Random(seed))
            for number in range(count):
                misses.judge(KINDS[number % len(KINDS)])
    num_wrong = misses.wrong.total()
    if num_wrong:
        say(f"  seed {seed}")
    for kind in KINDS:
        proof.at_least(f"explained_{kind}", misses.num_constructed[kind], 1)
    proof.equals("explain_wrong", num_wrong, 0, f"of {count}")
