"""Thoughts in chats and messages: told apart from the answer, and no longer than their budget."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.small_tokenizers import byte_level
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.thinkers import thinker

HELLO = [{"role": "user", "content": "hello"}]
BUDGETS = [1, 2, 16, 40]
END_ID = byte_level().library.token_to_id("</s>")


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": thinker()}) as served:
        yield served


def chat(here: LiveServer, **more: Any) -> Any:
    body = {"model": "oracle", "messages": HELLO, "max_tokens": 60, "temperature": 1, "seed": 3, **more}
    reply = here.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.data
    return reply.json


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_chats_thought_ends_with_its_budget_and_the_answer_follows(here: LiveServer, budget: int) -> None:
    whole = [
        chat(here, thinking_token_budget=budget, max_tokens=budget + 20, return_token_ids=True, seed=seed)
        for seed in range(8)
    ]
    lengths = [told["choices"][0]["token_ids"].index(END_ID) for told in whole]
    assert max(lengths) == budget, "some come to their end by themselves"
    assert any(told["choices"][0]["message"]["content"] for told in whole)


def test_a_thought_without_a_budget_goes_on(here: LiveServer) -> None:
    told = chat(here, ignore_eos=True)
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60
    assert not told["choices"][0]["message"]["content"]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_messages_thought_ends_with_its_budget(here: LiveServer, budget: int) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {"model": "oracle", "messages": HELLO, "max_tokens": budget + 12, "thinking": thinking}
    told = [here.post("/v1/messages", body).json["content"] for _ in range(8)]
    assert "text" in [block["type"] for content in told for block in content]


@pytest.mark.parametrize("budget", ["many", 2.5, True, 0])
def test_a_budget_that_is_no_number_of_tokens_is_refused(here: LiveServer, budget: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {"model": "oracle", "messages": HELLO, "max_tokens": 9, "thinking": thinking}
    refused = here.post("/v1/messages", body)
    assert refused.status == 400
    assert refused.json["error"]["type"] == "invalid_request_error"
