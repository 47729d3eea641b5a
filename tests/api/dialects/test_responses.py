"""The Responses API: items in, items out, streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ResponseFields
from quire.client.reply.outputs import Answer
from tests.api.dialects.test_messages import events
from tests.api.dialects.test_tools import PAINT, PLACE, SCHEMAS, tool_talker
from tests.support.servers.local_api import LiveServer, house

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "find", "description": "Finds.", "parameters": PLACE, "strict": False},
    {"type": "namespace", "name": "others", "tools": []},
    {"type": "web_search"},
    {"type": "function", "name": "paint", "parameters": PAINT},
]
FUNCTIONS: Any = [one for one in TOOLS if one["type"] == "function"]
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": tool_talker()}) as served:
        yield served


def body(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "input": "hello", "max_output_tokens": 400, "temperature": 1.0, **more}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}])
def test_a_call_that_is_wanted_is_an_item_that_fits(here: LiveServer, choice: Any) -> None:
    told = here.post(PATH, body(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)).json
    assert (told["object"], told["status"], told["error"]) == ("response", "completed", None)
    (call,) = [item for item in told["output"] if item["type"] == "function_call"]
    assert Draft202012Validator(SCHEMAS[call["name"]]).is_valid(json.loads(call["arguments"]))
    assert call["call_id"]
    assert call["status"] == "completed"
    used = told["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("extra", [{"tools": TOOLS, "tool_choice": "required"}, {"max_output_tokens": 9}])
def test_a_streams_items_come_to_a_whole_responses(here: LiveServer, extra: dict[str, Any]) -> None:
    asked = body(temperature=0, **extra)
    whole = here.post(PATH, asked).json
    told = events(here.post(PATH, {**asked, "stream": True}).data)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[0]["response"]["output"] == []
    last = told[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert last["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    assert without_ids(done) == without_ids(whole["output"])
    for at, item in enumerate(done):
        own = [event for event in told if event.get("output_index") == at]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"]
        said = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        match item["type"]:
            case "function_call":
                assert said == item["arguments"]
            case "message":
                assert said == item["content"][0]["text"]
            case "reasoning":
                assert said == item["content"][0]["text"]


def test_an_answer_without_items_leaves_no_message_behind() -> None:
    writer = ItemsWriter("m", ResponseFields.model_validate({"input": "x"}))
    assert writer.history_messages(Answer(0, "", (), "length")) == []
    (message,) = writer.history_messages(Answer(0, "", (), "length", reasoning="hm"))
    assert message["reasoning_content"] == "hm"


def test_an_answer_that_was_cut_is_incomplete(here: LiveServer) -> None:
    told = here.post(PATH, body(max_output_tokens=2)).json
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def conversation(prefix: str = "") -> list[dict[str, Any]]:
    """As an agent sends it back, with ids that begin with something."""
    return [
        {"type": "message", "id": f"{prefix}1", "role": "developer", "content": [{"type": "input_text", "text": "do"}]},
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": f"{prefix}2", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {
            "type": "function_call",
            "id": f"{prefix}3",
            "call_id": "c1",
            "name": "paint",
            "arguments": '{"colour": "red"}',
        },
        {"type": "function_call_output", "id": f"{prefix}4", "call_id": "c1", "output": "done"},
    ]


def test_a_conversation_goes_on_and_its_ids_change_no_token(here: LiveServer) -> None:
    one, two = (here.post(PATH, body(input=conversation(name), max_output_tokens=3)) for name in ("a", "b"))
    assert one.status == 200, one.data
    used = two.json["usage"]
    assert used["input_tokens"] == one.json["usage"]["input_tokens"]
    assert used["input_tokens_details"]["cached_tokens"] >= used["input_tokens"] - 2 * 4, "all but the last block"


def test_an_answer_may_have_to_be_json(here: LiveServer) -> None:
    shape = {"format": {"type": "json_schema", "name": "paint", "schema": PAINT}}
    (item,) = [one for one in here.post(PATH, body(text=shape)).json["output"] if one["type"] == "message"]
    assert Draft202012Validator(PAINT).is_valid(json.loads(item["content"][0]["text"]))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "song"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": None}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "poem"}}}, "text"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(here: LiveServer, extra: dict[str, Any], named: str) -> None:
    reply = here.post(PATH, body(**extra))
    assert reply.status == 400, reply.data
    assert reply.json["error"]["param"] == named


def test_what_does_not_matter_is_ignored(here: LiveServer) -> None:
    extra = {"store": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x", "client_metadata": {}}
    told = here.post(PATH, body(max_output_tokens=2, reasoning={"summary": "auto"}, **extra)).json
    assert told["store"] is False


def test_the_official_client_reads_streams(here: LiveServer) -> None:
    client = openai.OpenAI(base_url=here.url + "/v1", api_key="none")
    with client.responses.stream(
        model="oracle",
        input="hello",
        tools=FUNCTIONS,
        tool_choice="required",
        parallel_tool_calls=False,  # else chance may make more of them than there is room for
        max_output_tokens=400,
    ) as stream:
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    assert all(Draft202012Validator(SCHEMAS[call.name]).is_valid(json.loads(call.arguments)) for call in calls)
