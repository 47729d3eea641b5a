"""A server with oracle models (which compute nothing) and many tenants, and the client that asks it to explain."""

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
"""Tokens of a step where prompts are computed in chunks."""


class GatedRunner(OracleRunner):
    """An oracle whose steps wait while its gate (an event) is cleared."""

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
    """A client of a server with many tenants, each with a key; counts cases, and those that were right."""

    def __init__(self, server: LiveServer, num_wrong: int = 0) -> None:
        self.server = server
        self.num_tried: dict[str, int] = {}
        self.num_correct: dict[str, int] = {}

    def ask(self, tenant: str, path: str, body: dict[str, Any], **headers: str) -> Reply:
        return self.server.post(path, {"model": "oracle", **body}, x_api_key=key_of(tenant), **headers)

    def record(self, tenant: str, answer: Reply) -> dict[str, Any]:
        record = self.server.get(f"/v1/requests/{answer.headers['x-request-id']}/cache", x_api_key=key_of(tenant)).json
        return dict(record["prompts"][0])

    def judge(self, case: str, *checks: bool) -> None:
        self.num_tried[case] = self.num_tried.get(case, 0) + 1
        self.num_correct[case] = self.num_correct.get(case, 0) + all(checks)


def key_of(tenant: str) -> str:
    return f"sk-quire-{tenant}-{'x' * 24}"


@contextmanager
def serve(folder: Path, num_tenants: int, models: dict[str, OpenedModel]) -> Iterator[ExplainClient]:
    """Run a server whose tenants are `t0`, `t1` and so on."""
    keys_file = folder / f"keys-{Random().getrandbits(64):x}.json"
    names = [f"t{number}" for number in range(num_tenants)]
    write_keys(keys_file, [Key(name, digest_of(key_of(name))) for name in names])
    with house(models=models, keys_file=keys_file) as server:
        yield ExplainClient(server)


def text(random: Random, num_words: int) -> str:
    return " ".join(random.choices(WORDS, k=num_words))


def prompt_of(random: Random, num_tokens: int) -> Tokens:
    return tuple(random.randrange(8, 300) for _ in range(num_tokens))


def completion(tokens: Tokens, **more: Any) -> dict[str, Any]:
    return {"prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, **more}


def open_gated_model() -> tuple[OpenedModel, GatedRunner]:
    """Open a model that computes prompts in chunks, with a runner that can hold its steps."""
    model = talker(1 << 12, BLOCK_SIZE, max_step_tokens=CHUNK)
    runner = GatedRunner(model.engine.runner)  # type: ignore[arg-type]
    model.engine.runner = runner
    return model, runner


def ask_twice(client: ExplainClient, runner: GatedRunner, tokens: Tokens, tenants: tuple[str, str]) -> list[Reply]:
    """Send one prompt twice, the second while the first runs its first step; returns both answers."""
    server, connections = client.server, (client.server.connection(), client.server.connection())
    runner.is_waiting.clear()
    runner.gate.clear()
    for number, (connection, tenant) in enumerate(zip(connections, tenants, strict=True)):
        headers = {"content-type": "application/json", "x-api-key": key_of(tenant)}
        connection.request("POST", PROMPT_PATH, json.dumps({"model": "oracle", **completion(tokens)}), headers)
        server.wait_until_asked(number + 1)
        server.wait_until(lambda: all(record.handles for record, _ in server.admission.open_requests.values()))
        if not runner.is_waiting.wait(60):
            raise TimeoutError("no step began")
    runner.gate.set()
    responses = (connection.getresponse() for connection in connections)
    answers = [Reply(response.status, dict(response.getheaders()), response.read()) for response in responses]
    for connection in connections:
        connection.close()
    server.wait_until_free()
    return answers
