"""Tools in chats: what is called is always a tool there is, with arguments that fit, streamed or whole."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from quire.client.engines.opening import OpenedModel
from quire.client.request.text_model import TextModel
from quire.text.chat.rendering.template import ChatTemplate
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}</tool>{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' }}<tool_call>{{ '\\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ "\\n" }}</tool_call>'
    "{% endfor %}</end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "hello"}]


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("find", PLACE, description="Finds."), tool("paint", PAINT)]
SCHEMAS = {"find": PLACE, "paint": PAINT}


def tool_talker() -> OpenedModel:
    """A talker whose template knows tools."""
    opened = talker(num_blocks=512, max_sequence_tokens=1536)
    plain, template = opened.text, ChatTemplate(TEMPLATE, {})
    text = TextModel("oracle", opened.engine.info, plain.tokenizer, template, plain.eos_token_ids, {})
    return OpenedModel(opened.engine, text)


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": tool_talker(), "plain": talker()}) as served:
        yield served


def body(**more: Any) -> dict[str, Any]:
    told = {"model": "oracle", "messages": HELLO, "tools": TOOLS, "max_tokens": 300, "temperature": 1.0, "seed": 3}
    return {**told, **more}


def is_fit(call: dict[str, Any]) -> bool:
    """A call of a tool there is, with what it takes."""
    function = call["function"]
    return bool(Draft202012Validator(SCHEMAS[function["name"]]).is_valid(json.loads(function["arguments"])))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_a_call_that_is_wanted_comes_and_fits(here: LiveServer, choice: Any, seed: int) -> None:
    reply = here.post("/v1/chat/completions", body(tool_choice=choice, seed=seed, parallel_tool_calls=False))
    assert reply.status == 200, reply.data
    (told,) = reply.json["choices"]
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert is_fit(call)
    assert choice == "required" or call["function"]["name"] == "paint"


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_says_joined_what_a_whole_answer_says(here: LiveServer, seed: int) -> None:
    asked = body(tool_choice="required", seed=seed)
    (whole,) = here.post("/v1/chat/completions", asked).json["choices"]
    events = here.post("/v1/chat/completions", {**asked, "stream": True}).events
    choices = [choice for event in events for choice in event["choices"]]
    calls: dict[int, dict[str, Any]] = {}
    for choice in choices:
        for delta in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], delta)
            if call is not delta:
                assert set(delta) == {"index", "function"}
                call["function"]["arguments"] += delta["function"]["arguments"]
            else:
                assert delta["function"]["arguments"] == "", "a call is announced before its arguments"
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    said = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [call["function"] for call in calls.values()] == said


def test_a_text_may_come_instead_where_nothing_is_wanted(here: LiveServer) -> None:
    (told,) = here.post("/v1/chat/completions", body(max_tokens=20)).json["choices"]
    assert told["message"]["content"] or told["message"]["tool_calls"]


def test_tools_that_may_not_be_called_are_not_shown(here: LiveServer) -> None:
    without = here.post("/v1/chat/completions", body(tools=None, max_tokens=1)).json["usage"]["prompt_tokens"]
    none = here.post("/v1/chat/completions", body(tool_choice="none", max_tokens=1)).json["usage"]["prompt_tokens"]
    shown = here.post("/v1/chat/completions", body(max_tokens=1)).json["usage"]["prompt_tokens"]
    assert none == without < shown


def test_tools_are_counted_with_their_conversation(here: LiveServer) -> None:
    used = here.post("/v1/chat/completions", body(max_tokens=1)).json["usage"]["prompt_tokens"]
    assert here.post("/tokenize", {"model": "oracle", "messages": HELLO, "tools": TOOLS}).json["count"] == used


def test_a_raw_prompt_has_no_tools(here: LiveServer) -> None:
    refused = here.post("/v1/completions", {"model": "oracle", "prompt": "a", "tools": TOOLS})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tools")


def test_a_conversation_with_calls_and_their_results_goes_on(here: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"city": "B", "size": 1}'}}
    said = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said += [{"role": "tool", "tool_call_id": "call_1", "content": "found"}]
    reply = here.post("/v1/chat/completions", body(messages=said, max_tokens=5))
    assert reply.status == 200, reply.data


def test_an_answer_may_be_json_or_a_call(here: LiveServer) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT}}
    (told,) = here.post("/v1/chat/completions", body(response_format=shape)).json["choices"]
    message = told["message"]
    assert all(map(is_fit, message["tool_calls"])) if "tool_calls" in message else json.loads(message["content"])


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tools": [tool("bad name")]}, "tools"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [tool("a", "text")]}, "tools"),
        ({"tools": [tool(f"a{at}") for at in range(257)]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"regex": "[ab]"}, "regex"),
        ({"model": "plain"}, "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(here: LiveServer, extra: dict[str, Any], named: str) -> None:
    reply = here.post("/v1/chat/completions", body(**extra))
    assert reply.status == 400, reply.data
    assert reply.json["error"]["param"] == named


def test_kinds_of_tools_that_nobody_here_can_run_are_left_out(here: LiveServer) -> None:
    strange = [{"type": "web_search"}, *TOOLS]
    assert here.post("/v1/chat/completions", body(tools=strange, tool_choice="required")).status == 200
    assert here.post("/v1/chat/completions", body(tools=[], max_tokens=2)).status == 200


def test_the_official_client_reads_calls(here: LiveServer) -> None:
    client = openai.OpenAI(base_url=here.url + "/v1", api_key="none")
    with client.chat.completions.stream(
        model="oracle",
        messages=[{"role": "user", "content": "hello"}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=300,
        seed=1,
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert all(is_fit(call.model_dump()) for call in message.tool_calls)
