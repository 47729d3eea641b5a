"""Thoughts in chats and messages: told apart from the answer, and no longer than their budget."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
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


@pytest.fixture(scope="module")
def limited() -> Iterator[LiveServer]:
    settings = AdmissionSettings(thought_limits={"low": 3, "high": 30})
    with house(models={"oracle": thinker()}, settings=settings) as served:
        yield served


GREEDY = {"model": "oracle", "temperature": 0}
EFFORTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": lambda effort: {"messages": HELLO, "max_tokens": 60, "reasoning_effort": effort, **GREEDY},
    "/v1/responses": lambda effort: {
        "input": "hello",
        "max_output_tokens": 60,
        "reasoning": {"effort": effort},
        **GREEDY,
    },
    "/v1/messages": lambda effort: {"messages": HELLO, "max_tokens": 60, "output_config": {"effort": effort}, **GREEDY},
}


def length_of_thought(here: LiveServer, path: str, **body: Any) -> int:
    """In characters; each token of the oracle has about one."""
    reply = here.post(path, body)
    assert reply.status == 200, reply.data
    whole = reply.json
    thoughts = [choice["message"].get("reasoning", "") for choice in whole.get("choices", ())]
    thoughts += [block.get("thinking", "") for block in whole.get("content", ())]
    thoughts += [item["content"][0]["text"] for item in whole.get("output", ()) if item["type"] == "reasoning"]
    return sum(map(len, thoughts))


@pytest.mark.parametrize("path", EFFORTS)
def test_an_effort_has_the_operators_budget(limited: LiveServer, path: str) -> None:
    low, high = (length_of_thought(limited, path, **EFFORTS[path](effort)) for effort in ("low", "high"))
    free = length_of_thought(limited, path, **EFFORTS[path]("medium"))
    assert low < high < free


@pytest.mark.parametrize("effort", ["medium", None, 5])
def test_an_effort_that_has_no_budget_changes_nothing(limited: LiveServer, effort: Any) -> None:
    path = "/v1/messages"
    assert length_of_thought(limited, path, **EFFORTS[path](effort)) > 30


def test_a_budget_in_the_request_goes_before_the_efforts(limited: LiveServer) -> None:
    whole = chat(limited, reasoning_effort="low", thinking_token_budget=20, return_token_ids=True, ignore_eos=None)
    assert 3 < whole["choices"][0]["token_ids"].index(END_ID) <= 20
    thinking = {"type": "disabled"}
    more = {**EFFORTS["/v1/messages"]("low"), "thinking": thinking}
    assert length_of_thought(limited, "/v1/messages", **more) > 3


def test_an_efforts_budget_gives_way_to_a_grammar(limited: LiveServer) -> None:
    body = {**EFFORTS["/v1/chat/completions"]("low"), "regex": "[ab]{40}"}
    reply = limited.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.data
    refused = limited.post("/v1/chat/completions", {**body, "thinking_token_budget": 3})
    assert refused.status == 400
