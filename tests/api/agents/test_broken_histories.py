"""A conversation with a broken tool call goes on in each API: no client's fault in its history ends it for ever."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker
from tests.unit.text.chat.test_written_calls import BROKEN, STRICT

ARGUMENTS = ['{"path": "a', "", "[1]", "null", None, 7, ["a"], {"path": "a"}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "paint"}}]
BLOCKS_TOOLS = [{"name": "paint", "input_schema": {"type": "object"}}]
ITEMS_TOOLS = [{"type": "function", "name": "paint", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    opened = talker(512, max_sequence_tokens=1024, template=STRICT["walks arguments"])
    with house(models={"oracle": opened}) as served:
        yield served


def check(here: LiveServer, path: str, **body: Any) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    reply = here.post(path, {"model": "oracle", limit: 2, **body})
    assert reply.status == 200, reply.data


@pytest.mark.parametrize("name", BROKEN)
def test_a_chat_goes_on(here: LiveServer, name: str) -> None:
    check(here, "/v1/chat/completions", messages=BROKEN[name], tools=CHAT_TOOLS)
    check(here, "/v1/chat/completions", messages=BROKEN[name])


@pytest.mark.parametrize("name", ["paint", None, 5])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_responses_go_on(here: LiveServer, arguments: Any, name: Any) -> None:
    user = {"role": "user", "content": "hello"}
    call = {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c1", "output": arguments}
    for items in ([user, call, result], [user, call, user], [user, result, user], [result], [call], [user, call]):
        check(here, "/v1/responses", input=items, tools=ITEMS_TOOLS)


@pytest.mark.parametrize("name", ["paint", None, 5])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_messages_go_on(here: LiveServer, arguments: Any, name: Any) -> None:
    user = {"role": "user", "content": "hello"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": name, "input": arguments}]}
    content = {"type": "tool_result", "tool_use_id": "c1", "content": arguments}
    result = {"role": "user", "content": [content]}
    for messages in ([user, call, result], [user, call, user], [user, result, user], [result], [user, call]):
        check(here, "/v1/messages", messages=messages, tools=BLOCKS_TOOLS)
