"""Compaction: a conversation becomes its user messages and a summary by the model, in the types of the official SDK."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from quire.api.access.admission import AdmissionSettings
from quire.api.access.conversation_store import ConversationStore
from quire.api.dialects.openai.compaction import HEADING, PREFIX, SUMMARY_REQUEST
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import AGENT_TEMPLATE, talker

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "paint", "parameters": {"type": "object"}}]
USER: Any = {"role": "user", "content": "Paint the wall."}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "c1", "output": "painted"}
ITEMS: Any = [
    USER,
    CALL,
    RESULT,
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "More."}]},
]
TRIGGER: Any = {"type": "compaction_trigger"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = ConversationStore(tmp_path_factory.mktemp("store") / "talks.db", 1 << 20)
    opened = talker(1024, max_sequence_tokens=2048, max_bytes=16_000, template=AGENT_TEMPLATE)
    with house(models={"oracle": opened}, settings=AdmissionSettings(store=store)) as served:
        yield served
    store.close()


@pytest.fixture(scope="module")
def sdk(here: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)


def prompt_of(here: LiveServer, items: Any, **more: Any) -> int:
    reply = here.post(PATH, {"model": "oracle", "input": items, "max_output_tokens": 1, **more})
    assert reply.status == 200, reply.data
    return int(reply.json["usage"]["input_tokens"])


def test_a_conversation_becomes_its_user_messages_and_a_summary(sdk: OpenAI) -> None:
    compacted = sdk.responses.compact(model="oracle", input=ITEMS, instructions="Be kind.")
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    texts = [item.content[0].text for item in compacted.output if item.type == "message"]
    assert texts == ["Paint the wall.", "More."]
    last = compacted.output[-1]
    assert last.type == "compaction"
    assert last.encrypted_content.startswith(PREFIX)
    assert compacted.usage.output_tokens > 0


def test_the_summary_is_what_the_model_writes_to_the_request(here: LiveServer) -> None:
    body = {"model": "oracle", "temperature": 0, "top_p": 1}
    item = here.post(f"{PATH}/compact", {**body, "input": [USER]}).json["output"][-1]
    asked = {"role": "user", "content": f"{USER['content']}\n\n{SUMMARY_REQUEST}"}
    plain = here.post(PATH, {**body, "input": [asked], "max_output_tokens": 2000, "stop_loops": True}).json
    (text,) = [part["text"] for one in plain["output"] if one["type"] == "message" for part in one["content"]]
    assert item["encrypted_content"] == PREFIX + text.strip()


def test_the_conversation_is_found_in_the_cache(here: LiveServer) -> None:
    items = [{"role": "user", "content": "A long story. " * 12}, CALL, RESULT]
    num_prompt = prompt_of(here, items, tools=TOOLS)
    usage = here.post(f"{PATH}/compact", {"model": "oracle", "input": items, "tools": TOOLS}).json["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > num_prompt - 24, "all but the end, in blocks of 4"


def test_a_compaction_item_is_read_as_a_message(here: LiveServer) -> None:
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": f"{PREFIX}The wall is red."}
    message = {"role": "user", "content": f"{HEADING}The wall is red."}
    last = {"role": "assistant", "content": "Good."}
    assert prompt_of(here, [item, last, USER]) == prompt_of(here, [message, last, USER])
    output = here.post(f"{PATH}/compact", {"model": "oracle", "input": [USER, last, item]}).json["output"]
    assert [one["type"] for one in output] == ["message", "compaction"], "an earlier summary is part of the new one"


def test_a_trigger_compacts_within_a_stream(sdk: OpenAI) -> None:
    with sdk.responses.stream(model="oracle", input=[*ITEMS, TRIGGER], tools=TOOLS) as stream:
        events = [*stream]
        response = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[2:4] == ["response.output_item.added", "response.compaction.compacting"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    (item,) = response.output
    assert item.type == "compaction"
    assert item.encrypted_content.startswith(PREFIX)


def test_a_stored_conversation_goes_on_from_its_summary(here: LiveServer) -> None:
    whole = here.post(PATH, {"model": "oracle", "input": [*ITEMS, TRIGGER]}).json
    (item,) = whole["output"]
    kept = [USER, ITEMS[-1], item, {"role": "assistant", "content": "So."}]
    new = [{"role": "assistant", "content": "So."}]
    assert prompt_of(here, new, previous_response_id=whole["id"]) == prompt_of(here, kept)
    compacted = here.post(f"{PATH}/compact", {"model": "oracle", "previous_response_id": whole["id"]}).json
    assert [one["type"] for one in compacted["output"]] == ["message", "message", "compaction"]


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "compaction", "encrypted_content": "gAAAAABo"}],
        [{"type": "compaction"}],
        [TRIGGER, USER],
    ],
)
def test_what_cannot_be_read_is_refused(here: LiveServer, items: Any) -> None:
    for path in (PATH, f"{PATH}/compact"):
        refused = here.post(path, {"model": "oracle", "input": items})
        assert (refused.status, refused.json["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("items", [[], [TRIGGER], "hello", [CALL], [RESULT]])
def test_a_conversation_of_any_shape_is_compacted(here: LiveServer, items: Any) -> None:
    reply = here.post(f"{PATH}/compact", {"model": "oracle", "input": items, "stream": True})
    assert reply.status == 200, reply.data
    assert reply.json["output"][-1]["type"] == "compaction"
