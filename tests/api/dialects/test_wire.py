"""Small promises of the wire: what a message begins with, what is honoured or refused, how methods are answered."""

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from quire.client.request.text_model import TemplateArguments, TextModel
from quire.text.sandboxed.messages import Rendered
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "messages": HELLO, "max_tokens": 4, "temperature": 0.0, **more}


def prompt(text: Any = "the cat", **more: Any) -> dict[str, Any]:
    return {"model": "oracle", "prompt": text, "max_tokens": 4, "temperature": 0.0, **more}


@pytest.mark.parametrize(
    ("path", "asked", "given"),
    [
        (COMPLETE, prompt([40] * 600), "600"),
        (COMPLETE, prompt("x" * 5000), "5000"),
        (COMPLETE, prompt(max_tokens=511), "511"),
        (CHAT, body(messages=[{"role": "user", "content": "word " * 200}]), "tokens"),
        (CHAT, body(messages=[{"role": "user", "content": "x" * 9000}]), "bytes"),
        ("/tokenize", {"model": "oracle", "prompt": "x" * 5000}, "5000"),
    ],
)
def test_what_does_not_fit_is_said_in_the_words_clients_look_for(
    here: LiveServer, path: str, asked: dict[str, Any], given: str
) -> None:
    refused = here.post(path, asked)
    message = refused.json["error"]["message"]
    assert (refused.status, refused.code) == (400, "context_length_exceeded")
    assert message.startswith("This model's maximum context length is 512 tokens")
    assert given in message
    assert "shorten" in message


@pytest.mark.parametrize(
    ("path", "asked", "name"),
    [
        (CHAT, body(echo=True), "echo"),
        (CHAT, body(add_special_tokens=True), "add_special_tokens"),
        (CHAT, body(prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (COMPLETE, prompt(prompt_logprobs=0, stream=True), "prompt_logprobs"),
        (CHAT, body(truncation_side="left"), "truncation_side"),
        (COMPLETE, prompt(truncation_side="left"), "truncation_side"),
        ("/tokenize", {"model": "oracle", "messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"model": "oracle", "prompt": "x", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ("/tokenize", {"model": "oracle", "messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_is_known_and_not_built_is_refused(here: LiveServer, path: str, asked: dict[str, Any], name: str) -> None:
    refused = here.post(path, asked)
    assert (refused.status, refused.code, refused.json["error"]["param"]) == (400, "unsupported_parameter", name)


def test_a_conversation_is_counted_with_what_its_template_is_told(
    here: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[TemplateArguments] = []

    def spy(_self: TextModel, _messages: Any, arguments: TemplateArguments) -> Rendered:
        told.append(arguments)
        return Rendered("a", ())

    monkeypatch.setattr(TextModel, "rendered", spy)
    asked = {"model": "oracle", "messages": HELLO, "documents": [{"text": "a"}], "reasoning_effort": "low"}
    assert here.post("/tokenize", asked).json["count"] == 1
    assert here.post(CHAT, asked | {"max_tokens": 2}).status == 200
    assert told[0] == told[1] == TemplateArguments(documents=[{"text": "a"}], extra={"reasoning_effort": "low"})


def test_special_tokens_of_a_prompt_can_be_left_out(here: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, added = here.opened["oracle"].text.tokenizer, []
    really = tokenizer.encode

    def spy(text: str, add_special_tokens: bool) -> list[int]:
        added.append(add_special_tokens)
        return really(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", spy)
    for more in ({"add_special_tokens": False}, {"add_special_tokens": True}, {}):
        assert here.post(COMPLETE, prompt(**more)).status == 200
    assert added == [False, True, True]


def test_a_scored_prompt_shows_and_counts_no_token(here: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = prompt(["the cat", "a dog", "one two three"], echo=True, max_tokens=0, logprobs=0, return_token_ids=True)
    whole = here.post(COMPLETE, asked).json
    assert [choice["token_ids"] for choice in whole["choices"]] == [[], [], []]
    assert [choice["text"] for choice in whole["choices"]] == ["the cat", "a dog", "one two three"]
    events = here.post(COMPLETE, asked | {"stream": True, "stream_options": options}).events
    assert {event["usage"]["completion_tokens"] for event in events} == {0}
    shown = [choice.get("token_ids", []) for event in events for choice in event["choices"]]
    assert not any(shown)


def test_offsets_count_text_whatever_tokens_are_called(here: LiveServer) -> None:
    for more in ({}, {"echo": True}):
        named, numbered = (
            here.post(COMPLETE, prompt(logprobs=1, return_tokens_as_token_ids=flag, **more)).json["choices"][0]
            for flag in (False, True)
        )
        assert numbered["logprobs"]["tokens"][0].startswith("token_id:")
        assert numbered["logprobs"]["text_offset"] == named["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETE, "POST"),
        ("DELETE", "/v1/models/oracle", "GET"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/tokenize", "POST"),
    ],
)
def test_a_method_that_is_not_taken_is_told_which_are(here: LiveServer, method: str, path: str, allowed: str) -> None:
    refused = here.request(method, path)
    assert (refused.status, refused.code) == (405, "method_not_allowed")
    assert refused.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_may_ask_for_the_head_only(here: LiveServer, path: str) -> None:
    connection = HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE_S)
    for method in ("HEAD", "GET"):
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_a_locked_server_is_probed_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"keys": []}')
    (tmp_path / "keys.json").chmod(0o600)
    with house(keys_file=tmp_path / "keys.json") as here:
        assert here.request("HEAD", "/ready").status == 200
        assert here.request("HEAD", "/v1/models").status in (401, 405)


@pytest.mark.parametrize("odd", [5, ["a"], {"id": "me"}, True])
def test_fields_nobody_uses_may_have_any_shape(here: LiveServer, odd: Any) -> None:
    for name in ("user", "metadata", "store", "safety_identifier", "prompt_cache_key"):
        assert here.post(CHAT, body(**{name: odd})).status == 200, json.dumps({name: odd})
