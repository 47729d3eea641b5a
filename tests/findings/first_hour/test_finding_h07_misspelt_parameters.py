"""First hour, 7: `{"max_token": 3, "temprature": 0}` was answered with 200 and minutes of noise, and no word of it."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers.guarded_prompts import TEMPLATES
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/cache/explain": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [40]},
}
MISSPELT = [
    ("/v1/chat/completions", {"max_token": 3}, "max_token", "max_tokens"),
    ("/v1/chat/completions", {"temprature": 0}, "temprature", "temperature"),
    ("/v1/chat/completions", {"stream": True, "top_logprbos": 0}, "top_logprbos", "top_logprobs"),
    (
        "/v1/chat/completions",
        {"stream_options": {"include_usag": True}},
        "include_usag",
        "include_usage",
    ),
    ("/v1/chat/completions", {"response_format": {"type": "text", "json_shema": {}}}, "json_shema", "json_schema"),
    ("/v1/chat/completions", {"tools": [{**TOOL, "functoin": {}}]}, "tools.functoin", "tools.function"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "contnet": "x"}]}, "messages.contnet", "messages.content"),
    ("/v1/completions", {"stopp": "x"}, "stopp", "stop"),
    ("/v1/completions", {"Temperature": 0}, "Temperature", "temperature"),
    ("/v1/responses", {"max_output_token": 3}, "max_output_token", "max_output_tokens"),
    ("/v1/responses", {"text": {"fromat": {}}}, "text.fromat", "text.format"),
    ("/v1/messages", {"stop_sequence": ["x"]}, "stop_sequence", "stop_sequences"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_token": 9}}, "budget_token", "budget_tokens"),
    ("/v1/messages/count_tokens", {"systen": "x"}, "systen", "system"),
    ("/v1/cache/explain", {"cache_sallt": "x"}, "cache_sallt", "cache_salt"),
    ("/tokenize", {"add_special_token": False}, "add_special_token", "add_special_tokens"),
    ("/detokenize", {"tokns": [1]}, "tokns", "tokens"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": talker(template=TEMPLATES[""])}) as running:
        yield running


@pytest.mark.parametrize(("path", "more", "name", "meant"), MISSPELT, ids=[f"{one[0]} {one[2]}" for one in MISSPELT])
def test_a_name_one_mistake_away_is_refused_with_the_one_that_was_meant(
    here: LiveServer, path: str, more: dict[str, Any], name: str, meant: str
) -> None:
    answer = here.post(path, {"model": "oracle", **BODIES[path], **more})
    assert answer.status == 400, answer.data
    _, _, told = answer.json["error"]["message"].partition("expected a known parameter, got ")
    got, _, say = told.partition("; use ")
    assert name in got
    assert meant in say


@pytest.mark.parametrize("path", BODIES)
def test_any_other_unknown_name_is_told_in_the_answers_head(here: LiveServer, path: str) -> None:
    more: dict[str, Any] = {"nonsense": 1, "mirostat": 2, "stop_seq": None, "a, b": {}, "é": 0}
    answer = here.post(path, {"model": "oracle", **BODIES[path], **more})
    assert answer.status == 200, answer.data
    assert answer.headers["x-quire-ignored"] == "nonsense, mirostat, stop_seq, 'a\\x2c b', '\\xe9'"


def test_a_stream_and_a_refusal_tell_it_too(here: LiveServer) -> None:
    body = {"model": "oracle", **BODIES["/v1/chat/completions"], "trace": {}, "tools": [{**TOOL, "cache_control": {}}]}
    told = "trace, tools.cache_control"
    assert here.post("/v1/chat/completions", body).headers["x-quire-ignored"] == told
    plain = {**body, "tools": []}
    assert here.post("/v1/chat/completions", {**plain, "stream": True}).headers["x-quire-ignored"] == "trace"
    refused = here.post("/v1/chat/completions", {**plain, "temperature": -1})
    assert (refused.status, refused.headers["x-quire-ignored"]) == (400, "trace")
    assert "x-quire-ignored" not in here.post("/v1/completions", {"model": "oracle", "prompt": "x"}).headers


def test_names_are_logged_once_and_not_without_end(here: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    def send(names: list[str]) -> list[str]:
        caplog.clear()
        here.post("/tokenize", {"model": "oracle", "prompt": "x", **dict.fromkeys(names, 1)})
        here.wait_until_free()
        return [one.getMessage() for one in caplog.records if "ignored unknown parameters" in one.getMessage()]

    with caplog.at_level(logging.WARNING, "quire.api"):
        (line,) = send(["first_name", "line\nbreak"])
        assert line.endswith("parameters: first_name, 'line\\nbreak'")
        (line,) = send(["first_name", "second_name"])
        assert line.endswith("parameters: second_name")
        assert send(["first_name", "second_name"]) == []
        for start in range(0, 500, 100):
            send([f"unknown-{number}" for number in range(start, start + 100)])
        assert send(["one_more_name"]) == []


def test_a_head_stays_small_and_a_flood_of_names_is_refused(here: LiveServer) -> None:
    def send(count: int) -> Any:
        return here.post("/tokenize", {"model": "oracle", "prompt": "x", **{f"u{at:060}": 1 for at in range(count)}})

    many = send(400).headers["x-quire-ignored"]
    assert len(many) < 4200
    assert int(many.rpartition("more=")[2]) + many.count("u") == 400
    assert send(513).status == 400
