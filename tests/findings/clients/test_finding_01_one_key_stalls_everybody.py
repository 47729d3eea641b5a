"""Finding 1: text was worked on before anybody was charged for it, in one queue for all keys."""

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.keys import add_key
from quire.api.server_state import ServerState
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import paced_talker

CHAT = "/v1/chat/completions"
TOO_LONG = "🎈" * 3_000
"""More tokens than the model's longest sequence, fewer characters than a text may have."""
NUM_CONNECTIONS = 16


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "oracle", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(TOO_LONG)),
        ("/v1/completions", {"model": "oracle", "prompt": TOO_LONG}),
        (CHAT, b'{"messages": '),
        ("/detokenize", b"[]"),
    ],
    ids=["a chat that does not fit", "a prompt that does not fit", "half a body", "no object"],
)
def test_a_request_that_is_refused_for_its_text_has_been_charged(tmp_path: Path, path: str, body: Any) -> None:
    secret = add_key(tmp_path / "keys.json", "limited", requests_per_minute=1, tokens_per_minute=10_000)
    with house(keys_file=tmp_path / "keys.json") as here:
        assert here.post(path, body, x_api_key=secret).status == 400
        again = here.post(CHAT, chat("hello"), x_api_key=secret)
        assert again.status == 429
        assert 1 <= int(again.headers["retry-after"]) <= 60


def test_text_is_charged_by_its_bytes(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "limited", tokens_per_minute=100)
    with house(keys_file=tmp_path / "keys.json") as here:
        long = {"model": "oracle", "prompt": "word", "unknown": "x" * 1500}
        assert here.post("/tokenize", long, x_api_key=secret).status == 200
        assert here.post("/tokenize", {"model": "oracle", "prompt": "word"}, x_api_key=secret).status == 429


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Texts that begin with `slow` are tokenised when the event is set."""
    go_on = threading.Event()
    really_render, really_encode = ChatTemplate.render, Tokenizer.encode

    def slow_render(template: ChatTemplate, messages: Any, *arguments: Any) -> Any:
        if str(messages[0]["content"]).startswith("slow"):
            go_on.wait(60)
        return really_render(template, messages, *arguments)

    def slow_encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if text.startswith("slow"):
            go_on.wait(60)
        return really_encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(ChatTemplate, "render", slow_render)
    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    yield go_on
    go_on.set()


def ask(here: LiveServer, path: str, body: Any, secret: str, timeout_s: float = 30) -> HTTPConnection:
    connection = here.connection(timeout_s)
    headers = {"x-api-key": secret, "content-type": "application/json"}
    connection.request("POST", path, json.dumps(body).encode(), headers)
    return connection


def num_open_requests(admission: ServerState, tenant: str) -> Callable[[], int]:
    return lambda: sum(caller.tenant == tenant for _, caller in admission.open_requests.values())


def test_the_texts_of_one_key_do_not_hold_up_those_of_another(tmp_path: Path, gate: threading.Event) -> None:
    keys = tmp_path / "keys.json"
    greedy, other = add_key(keys, "greedy"), add_key(keys, "other")
    with house(keys_file=keys) as here:
        held = [ask(here, CHAT, chat(f"slow {at}"), greedy) for at in range(NUM_CONNECTIONS)]
        here.wait_until(lambda: num_open_requests(here.admission, "greedy")() == NUM_CONNECTIONS, 30)
        waiting = ask(here, CHAT, chat("hello"), other, timeout_s=20)
        try:
            status: int | str = waiting.getresponse().status
        except TimeoutError:
            status = "no answer while another key's texts were worked on"
        finally:
            gate.set()
        for connection in held:
            assert connection.getresponse().status == 200
            connection.close()
        waiting.close()
        here.wait_until_free(30)
    assert status == 200


def test_whoever_leaves_while_a_text_waits_is_gone(tmp_path: Path, gate: threading.Event) -> None:
    keys = tmp_path / "keys.json"
    greedy = add_key(keys, "greedy")
    with house(keys_file=keys) as here:
        leaving = [ask(here, "/tokenize", {"messages": chat(f"slow {at}")["messages"], "model": "oracle"}, greedy)
                   for at in range(NUM_CONNECTIONS)]  # fmt: skip
        here.wait_until(lambda: num_open_requests(here.admission, "greedy")() == NUM_CONNECTIONS, 30)
        for connection in leaving:
            connection.close()
        try:
            here.wait_until(lambda: not here.admission.open_requests, 20)
            is_empty = True
        except TimeoutError:
            is_empty = False
        finally:
            gate.set()
        here.wait_until_free(30)
    assert is_empty, "clients left, and their work was kept"


def test_output_tokens_are_charged_and_counted_as_they_come(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = add_key(keys, "alice", tokens_per_minute=100_000)
    opened, runner = paced_talker()
    with house(models={"oracle": opened}, keys_file=keys) as here:
        asked = {"model": "oracle", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        running = ask(here, "/v1/completions", asked, secret)
        here.wait_until(lambda: bool(here.admission.open_requests), 30)
        quota = next(iter(here.admission.open_requests.values()))[1].quota
        assert runner.is_waiting.wait(30)
        here.wait_until(lambda: len(opened.engine.scheduler.live) == 1, 30)
        assert quota.tokens is not None
        full_at_s = quota.tokens.full_at_s
        runner.allow(30)
        record = next(iter(here.admission.open_requests.values()))[0]
        here.wait_until(lambda: record.num_output_tokens >= 20, 30)
        page = here.get("/metrics", x_api_key=secret).data.decode()
        num_charged = (quota.tokens.full_at_s - full_at_s) * quota.tokens.per_minute / 60
        runner.let_go()
        assert running.getresponse().read()
        running.close()
        here.wait_until_free(30)
    counted = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert counted, "no token was counted while the answer was running"
    assert float(counted[0].rpartition(" ")[2]) >= 20
    assert num_charged >= 20
