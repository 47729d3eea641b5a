"""How many log-probabilities an answer may hold: what counts, what does not, and what a client is told."""

from typing import Any

import pytest

from quire.api.dialects.openai import fields
from tests.support.servers.local_api import LiveServer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
LIMIT = 120
IDS = [7] * 10
HELLO = [{"role": "user", "content": "hello"}]


def complete(**more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETE, {"model": "oracle", "prompt": IDS, "max_tokens": 10, "ignore_eos": True, **more}


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "oracle", "messages": HELLO, "ignore_eos": True, **more}


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MAX_ANSWER_LOGPROBS", LIMIT)


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (complete(logprobs=12), 10 * 13),
        (complete(logprobs=5, echo=True, n=2), 2 * (10 + 10) * 6),
        (complete(prompt=[IDS, IDS], prompt_logprobs=5, n=2), 2 * 20 * 6),
        (complete(logprobs=2, echo=True, prompt_logprobs=2, n=2), 2 * (10 * 3 * 2 + 10 * 3)),
        (complete(logprobs=12, echo=True, stream=True), 10 * 13),
        (chat(prompt_logprobs=20, n=3), None),
        (chat(logprobs=True, top_logprobs=2), None),
    ],
)
def test_an_answer_of_too_many_logprobs_is_refused_with_their_number(
    here: LiveServer, asked: tuple[str, dict[str, Any]], count: int | None
) -> None:
    reply = here.post(*asked)
    assert (reply.status, reply.code) == (400, "invalid_parameter")
    message, param = reply.json["error"]["message"], reply.json["error"]["param"]
    assert f"at most {LIMIT} log-probabilities" in message
    assert count is None or f", got {count};" in message
    assert param in ("logprobs", "prompt_logprobs")


@pytest.mark.parametrize(
    "asked",
    [
        complete(logprobs=11),
        complete(logprobs=20, stream=True),
        complete(logprobs=2, echo=True, prompt_logprobs=2),
        complete(n=4, max_tokens=100),
        chat(logprobs=True, top_logprobs=20, max_tokens=5),
        chat(logprobs=True, top_logprobs=20, max_tokens=60, stream=True),
    ],
)
def test_up_to_the_limit_and_in_streams_of_answers_they_are_given(
    here: LiveServer, asked: tuple[str, dict[str, Any]]
) -> None:
    assert here.post(*asked).status == 200


def test_every_answer_to_a_prompt_says_the_same_of_it(here: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MAX_ANSWER_LOGPROBS", 10_000)
    asked = {"echo": True, "logprobs": 2, "prompt_logprobs": 2, "return_token_ids": True, "seed": 1}
    several = here.post(*complete(n=3, **asked)).json["choices"]
    (alone,) = here.post(*complete(n=1, **asked)).json["choices"]
    for choice in several:
        assert choice["prompt_logprobs"] == alone["prompt_logprobs"]
        assert choice["prompt_token_ids"] == IDS
        for name, entries in choice["logprobs"].items():
            assert entries[: len(IDS)] == alone["logprobs"][name][: len(IDS)]
            assert len(entries) == len(IDS) + 10
    assert several[0] == alone
    assert len(alone["prompt_logprobs"]) == len(IDS)
    assert len(alone["prompt_logprobs"][1]) == 3
