"""A server with oracles and many tenants, and how the proofs of explanations ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from proofs.see.explain_model import BLOCK_SIZE, Tokens
from quire.api.access.keys import Key, digest_of, write_keys
from quire.backends.oracle import OracleRunner
from quire.client.engines.opening import OpenedModel
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from tests.support.servers.local_api import LiveServer, Reply, house
from tests.support.servers.talkers import talker

WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "then", "other", "dogs", "came", "home", "late", "and", "nobody"),
    *("read", "any", "books", "about", "them", "again"),
)
PROMPT_PATH = "/v1/completions"
EXPLAIN_PATH = "/v1/cache/explain"
CHUNK = 24
"""Tokens of a step where prompts are computed bit by bit."""


class GatedRunner(OracleRunner):
    """An oracle whose steps wait while its gate is shut."""

    def __init__(self, plain: OracleRunner) -> None:
        super().__init__(plain.capacity)
        self.gate = Event()
        self.gate.set()
        self.is_waiting = Event()

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if not self.gate.is_set():
            self.is_waiting.set()
            self.gate.wait()
        return super().run(plan, masks)


class ExplainClient:
    """A server, asked by many tenants with a key each."""

    def __init__(self, here: LiveServer, num_wrong: int = 0) -> None:
        self.here = here
        self.num_tried: dict[str, int] = {}
        self.num_right: dict[str, int] = {}

    def ask(self, tenant: str, path: str, body: dict[str, Any], **headers: str) -> Reply:
        return self.here.post(path, {"model": "oracle", **body}, x_api_key=key_of(tenant), **headers)

    def record(self, tenant: str, answer: Reply) -> dict[str, Any]:
        told = self.here.get(f"/v1/requests/{answer.headers['x-request-id']}/cache", x_api_key=key_of(tenant)).json
        return dict(told["prompts"][0])

    def judge(self, case: str, *checks: bool) -> None:
        self.num_tried[case] = self.num_tried.get(case, 0) + 1
        self.num_right[case] = self.num_right.get(case, 0) + all(checks)


def key_of(tenant: str) -> str:
    return f"sk-quire-{tenant}-{'x' * 24}"


@contextmanager
def asked(folder: Path, num_tenants: int, models: dict[str, OpenedModel]) -> Iterator[ExplainClient]:
    """A server whose tenants are `t0`, `t1` and so on."""
    file = folder / f"keys-{Random().getrandbits(64):x}.json"
    names = [f"t{at}" for at in range(num_tenants)]
    write_keys(file, [Key(name, digest_of(key_of(name))) for name in names])
    with house(models=models, keys_file=file) as here:
        yield ExplainClient(here)


def text(random: Random, num_words: int) -> str:
    return " ".join(random.choices(WORDS, k=num_words))


def prompt_of(random: Random, num_tokens: int) -> Tokens:
    return tuple(random.randrange(8, 300) for _ in range(num_tokens))


def completion(tokens: Tokens, **more: Any) -> dict[str, Any]:
    return {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, **more}


def gated() -> tuple[OpenedModel, GatedRunner]:
    """A model that computes prompts bit by bit, and the gate before its steps."""
    opened = talker(1 << 12, BLOCK_SIZE, max_step_tokens=CHUNK)
    runner = GatedRunner(opened.engine.runner)  # type: ignore[arg-type]
    opened.engine.runner = runner
    return opened, runner


def met(asking: ExplainClient, runner: GatedRunner, tokens: Tokens, tenants: tuple[str, str]) -> list[Reply]:
    """Two ask the same prompt, the second while the first step of the first is under way; both answers."""
    here = asking.here
    runner.is_waiting.clear()
    runner.gate.clear()
    both = (here.connection(), here.connection())
    for number, (connection, tenant) in enumerate(zip(both, tenants, strict=True)):
        headers = {"content-type": "application/json", "x-api-key": key_of(tenant)}
        connection.request("POST", PROMPT_PATH, json.dumps({"model": "oracle", **completion(tokens)}), headers)
        here.wait_until_asked(number + 1)
        here.wait_until(lambda: all(record.handles for record, _ in here.admission.open_requests.values()))
        if not runner.is_waiting.wait(60):
            raise TimeoutError("no step began")
    runner.gate.set()
    answers = [Reply(one.status, dict(one.getheaders()), one.read()) for one in (two.getresponse() for two in both)]
    for connection in both:
        connection.close()
    here.wait_until_free()
    return answers
