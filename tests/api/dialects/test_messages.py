"""The Anthropic API: messages of blocks, streamed and whole, with tools, thoughts and its own errors."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from quire.api.access.admission import AdmissionSettings
from quire.api.dialects.anthropic.writer import valid_calls
from quire.client.reply.outputs import Answer, ToolCall
from tests.api.dialects.test_tools import PAINT, PLACE, SCHEMAS, tool_talker
from tests.support.servers.local_api import LiveServer, house

TOOLS = [
    {"name": "find", "description": "Finds.", "input_schema": PLACE, "cache_control": {"type": "ephemeral"}},
    {"name": "paint", "input_schema": PAINT},
]
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def here() -> Any:
    settings = AdmissionSettings(are_images_dropped=True)
    with house(models={"oracle": tool_talker()}, settings=settings) as served:
        yield served


def body(**more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "hello"}]
    return {"model": "oracle", "max_tokens": 400, "messages": said, "temperature": 1.0, **more}


def events(data: bytes) -> list[dict[str, Any]]:
    """Each with its name in a line of its own."""
    told = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, line = frame.split("\n")
        told.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def joined(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream's events make, as a client puts them together."""
    blocks: list[dict[str, Any]] = []
    open_index = None
    for event in told:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == len(blocks)
                open_index = event["index"]
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == open_index
                delta, block = event["delta"], blocks[-1]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        block["input"] = (block["input"] or "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
    assert open_index is None
    return [
        {**block, "input": json.loads(block["input"])} if block["type"] == "tool_use" else block for block in blocks
    ]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "paint"}])
def test_a_call_that_is_wanted_is_a_block_that_fits(here: LiveServer, choice: dict[str, Any]) -> None:
    message = here.post(PATH, body(tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})).json
    assert message["type"] == "message"
    assert message["id"].startswith("msg_")
    assert message["stop_reason"] == "tool_use"
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    assert Draft202012Validator(SCHEMAS[call["name"]]).is_valid(call["input"])
    assert "name" not in choice or call["name"] == choice["name"]


def test_a_streams_blocks_come_to_a_whole_messages(here: LiveServer) -> None:
    asked = body(tools=TOOLS, tool_choice={"type": "any"}, temperature=0)
    whole = here.post(PATH, asked).json
    told = events(here.post(PATH, {**asked, "stream": True}).data)
    assert told[0]["type"] == "message_start"
    assert [event["type"] for event in told][-2:] == ["message_delta", "message_stop"]
    start, end = told[0]["message"], told[-2]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert end["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks, said = joined(told), whole["content"]
    assert [block.pop("id", None) is None for block in blocks] == [block.pop("id", None) is None for block in said]
    assert blocks == said


def test_of_an_answer_that_was_cut_only_the_last_call_loses_its_arguments() -> None:
    calls = tuple(ToolCall(str(at), "find", given) for at, given in enumerate(['{"a": 1}', "{}", '{"a": "b']))
    told = valid_calls(Answer(0, "", (), "length", tool_calls=calls))
    assert [call.arguments for call in told] == ['{"a": 1}', "{}", "{}"]


def test_a_text_that_is_cut_says_so(here: LiveServer) -> None:
    message = here.post(PATH, body(max_tokens=3, temperature=0.0)).json
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 3


def test_cached_tokens_are_counted_apart(here: LiveServer) -> None:
    asked = body(messages=[{"role": "user", "content": "a rather long question " * 8}], max_tokens=2)
    first, second = here.post(PATH, asked).json["usage"], here.post(PATH, asked).json["usage"]
    assert second["cache_read_input_tokens"] > first["cache_read_input_tokens"]
    assert sum(first[name] for name in first if name != "output_tokens") == sum(
        second[name] for name in second if name != "output_tokens"
    )


def conversation(**first: Any) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "paint", "input": {"colour": "red"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]}
    return [
        {"role": "user", "content": "hello", **first},
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]


def count(here: LiveServer, **more: Any) -> int:
    return int(here.post(f"{PATH}/count_tokens", {"model": "oracle", **more}).json["input_tokens"])


def test_a_conversation_with_thoughts_calls_and_results_goes_on(here: LiveServer) -> None:
    reply = here.post(PATH, body(messages=conversation(), tools=TOOLS, max_tokens=4, system="you are one"))
    assert reply.status == 200, reply.data
    counted = count(here, messages=conversation(), tools=TOOLS, system="you are one")
    used = reply.json["usage"]
    written, cached = used["cache_creation_input_tokens"], used["cache_read_input_tokens"]
    assert used["input_tokens"] + written + cached == counted
    assert written % 4 == 0
    assert used["input_tokens"] <= 4, "all whole blocks are cached now"


def test_what_clients_change_without_meaning_anything_changes_no_token(here: LiveServer) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    plain = count(here, messages=conversation(), system="you are one")
    blocks = [{"type": "text", "text": "hello", **hint}]
    told = [
        {"type": "text", "text": "x-anthropic-billing-header: 2.1.a1b;"},
        {"type": "text", "text": "you are one", **hint},
    ]
    assert count(here, messages=conversation(content=blocks), system=told, metadata={"user_id": "x"}) == plain


def test_pictures_are_left_out_where_the_operator_says_so(here: LiveServer) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    shown = [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]
    assert count(here, messages=shown) > count(here, messages=[{"role": "user", "content": "what is it?"}])
    with house(models={"oracle": tool_talker()}) as strict:
        refused = strict.post(PATH, body(messages=shown))
    assert refused.status == 400
    assert "--drop-images" in refused.json["error"]["message"]


def test_pictures_in_chats_are_left_out_as_well(here: LiveServer) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    asked = {"model": "oracle", "messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
    assert here.post("/v1/chat/completions", asked).status == 200
    with house(models={"oracle": tool_talker()}) as strict:
        assert strict.post("/v1/chat/completions", asked).status == 400


def test_an_answer_may_have_to_be_json(here: LiveServer) -> None:
    shape = {"format": {"type": "json_schema", "schema": PAINT}}
    message = here.post(PATH, body(output_config=shape, thinking={"type": "disabled"})).json
    (text,) = [block["text"] for block in message["content"] if block["type"] == "text"]
    assert Draft202012Validator(PAINT).is_valid(json.loads(text))


@pytest.mark.parametrize(
    "extra",
    [
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "song"}]}]},
        {"system": [{"type": "image"}]},
        {"tools": [{"name": "no way", "input_schema": {}}]},
        {"tools": TOOLS, "tool_choice": {"type": "maybe"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": 5}},
        {"output_config": {"format": {"type": "poem"}}},
        {"thread": {"type": "create"}},
        {"max_tokens": 0},
        {"max_tokens": None},
    ],
)
def test_what_cannot_be_is_refused_in_this_apis_shape(here: LiveServer, extra: dict[str, Any]) -> None:
    reply = here.post(PATH, body(**extra))
    assert reply.status == 400, reply.data
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(here: LiveServer) -> None:
    limit = here.opened["oracle"].text.max_sequence_tokens
    refused = here.post(PATH, body(messages=[{"role": "user", "content": "ab " * 4000}]))
    assert refused.status == 400
    assert refused.json["error"]["message"] == f"prompt is too long: {limit + 1} tokens > {limit} maximum"


def test_an_unknown_model_is_not_found(here: LiveServer) -> None:
    refused = here.post(PATH, body(model="other"))
    assert (refused.status, refused.json["error"]["type"]) == (404, "not_found_error")


def test_a_path_below_that_leads_nowhere_is_told_in_this_apis_shape(here: LiveServer) -> None:
    assert here.post(f"{PATH}/batches", {}).json["type"] == "error"
