"""Conversations that are gone on with by an id are those that would be sent whole, and nobody else's."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.access.admission import AdmissionSettings
from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.api.access.keys import add_key
from quire.errors import ConfigError
from tests.api.dialects.test_tools import PLACE, tool_talker
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house

MAX_BYTES = 2_000
TOOL = {"name": "find", "description": "Finds.", "parameters": PLACE}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {name: add_key(tmp_path / "keys.json", name) for name in ("alice", "bob")}


@pytest.fixture
def here(tmp_path: Path, keys: dict[str, str]) -> Iterator[LiveServer]:
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    with house(
        models={"oracle": tool_talker()},
        keys_file=tmp_path / "keys.json",
        settings=AdmissionSettings(store=store),
    ) as served:
        yield served
    store.close()


def respond(here: LiveServer, key: str, given: Any, **more: Any) -> Any:
    body = {"model": "oracle", "input": given, "temperature": 0, "max_output_tokens": 12, **more}
    return here.post("/v1/responses", body, x_api_key=key)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_going_on_by_an_id_is_the_same_as_sending_everything(
    here: LiveServer, keys: dict[str, str], is_called: bool, is_streamed: bool
) -> None:
    more: dict[str, Any] = {"instructions": "be brief"}
    if is_called:
        more |= {"tools": [{"type": "function", **TOOL}], "tool_choice": "required", "max_output_tokens": 80}
    new: list[Any] = [{"role": "user", "content": "one"}]
    history = new
    previous: dict[str, Any] = {}
    for turn in ("two", "three", "four"):
        by_id = respond(here, keys["alice"], new, stream=is_streamed, **previous, **more)
        told = by_id.json if not is_streamed else _completed(by_id.data)
        whole = respond(here, keys["alice"], history, store=False, **more).json
        assert told["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert _said(told) == _said(whole)
        assert (told["store"], whole["store"]) == (True, False)
        outputs = [_output(item) for item in told["output"] if item["type"] == "function_call"]
        assert bool(outputs) == is_called
        assert told["previous_response_id"] == previous.get("previous_response_id")
        new = [*outputs, {"role": "user", "content": turn}]  # a call and what came of it go together
        history = [*history, *told["output"], *new]
        previous = {"previous_response_id": told["id"]}


CUTS = [1, 4, 12, 30, 36, 44, 60, 90]


@pytest.mark.parametrize("limit", CUTS)
def test_a_response_that_was_cut_anywhere_goes_on_as_if_all_were_sent(
    here: LiveServer, keys: dict[str, str], limit: int
) -> None:
    how: dict[str, Any] = {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}
    hello = {"role": "user", "content": "hello"}
    first = respond(here, keys["alice"], [hello], max_output_tokens=limit, **how).json
    outputs = [_output(item) for item in first["output"] if item["type"] == "function_call"]
    by_id = respond(here, keys["alice"], [*outputs, hello], previous_response_id=first["id"], **how).json
    whole = respond(here, keys["alice"], [hello, *first["output"], *outputs, hello], **how).json
    assert by_id["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert _said(by_id) == _said(whole)


@pytest.mark.parametrize("limit", CUTS)
def test_a_message_that_was_cut_anywhere_goes_on_as_if_all_were_sent(
    here: LiveServer, keys: dict[str, str], limit: int
) -> None:
    tools = [{"name": "find", "description": "Finds.", "input_schema": PLACE}]
    how: dict[str, Any] = {"tools": tools, "tool_choice": {"type": "any"}}
    hello = {"role": "user", "content": "hello"}
    first = message(here, keys["alice"], [hello], thread={"type": "create"}, max_tokens=limit, **how).json
    calls = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "done"} for call_id in calls]
    new = {"role": "user", "content": [*results, {"type": "text", "text": "more"}]}
    thread = {"type": "continue", "previous_message_id": first["id"]}
    by_id = message(here, keys["alice"], [new], thread=thread, **how).json
    history = [hello, {"role": "assistant", "content": first["content"]}, new]
    whole = message(here, keys["alice"], history, **how).json
    assert _num_prompt_tokens(by_id) == _num_prompt_tokens(whole)


def _completed(data: bytes) -> Any:
    last = [line for line in data.decode().splitlines() if line.startswith("data: ")][-1]
    return json.loads(last.removeprefix("data: "))["response"]


def _said(response: Any) -> list[Any]:
    return [item.get("content") or (item.get("name"), item.get("arguments")) for item in response["output"]]


def _output(item: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}


def test_anothers_conversation_reads_as_unknown(here: LiveServer, keys: dict[str, str]) -> None:
    answer = respond(here, keys["alice"], "hello").json
    for key, answer_id in ((keys["bob"], answer["id"]), (keys["alice"], "resp_none")):
        refused = respond(here, key, "more", previous_response_id=answer_id)
        assert (refused.status, refused.code) == (400, "previous_response_not_found")


def test_what_was_not_to_be_kept_is_not(here: LiveServer, keys: dict[str, str]) -> None:
    answer = respond(here, keys["alice"], "hello", store=False).json
    assert respond(here, keys["alice"], "more", previous_response_id=answer["id"]).status == 400


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_kept_response_is_read_back_as_it_was_told_and_forgotten(
    here: LiveServer, keys: dict[str, str], is_streamed: bool
) -> None:
    tools = {"tools": [{"type": "function", **TOOL}], "tool_choice": "required", "max_output_tokens": 80}
    reply = respond(here, keys["alice"], "hello", stream=is_streamed, **tools)
    told = _completed(reply.data) if is_streamed else reply.json
    path = f"/v1/responses/{told['id']}"
    assert here.get(path, x_api_key=keys["alice"]).json == told
    for method, key in (("GET", "bob"), ("DELETE", "bob")):
        refused = here.request(method, path, x_api_key=keys[key])
        assert (refused.status, refused.code) == (404, "response_not_found")
    later = respond(here, keys["alice"], "more", previous_response_id=told["id"]).json
    gone = here.request("DELETE", path, x_api_key=keys["alice"]).json
    assert gone == {"id": told["id"], "object": "response", "deleted": True}
    assert here.get(path, x_api_key=keys["alice"]).status == 404
    assert respond(here, keys["alice"], "more", previous_response_id=told["id"]).status == 400
    assert respond(here, keys["alice"], "more", previous_response_id=later["id"]).status == 200


def test_a_messages_thread_is_no_response(here: LiveServer, keys: dict[str, str]) -> None:
    first = message(here, keys["alice"], [{"role": "user", "content": "hello"}], thread={"type": "create"}).json
    assert here.get(f"/v1/responses/{first['id']}", x_api_key=keys["alice"]).status == 404


def test_a_server_without_a_store_says_so_and_answers_all_else() -> None:
    with house(models={"oracle": tool_talker()}) as served:
        body = {"model": "oracle", "input": "hello", "store": True, "max_output_tokens": 3}
        assert served.post("/v1/responses", body).json["store"] is False
        refused = served.post("/v1/responses", {**body, "previous_response_id": "resp_1"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")
        message = {"model": "oracle", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        thread = served.post("/v1/messages", {**message, "thread": {"type": "create"}})
        assert thread.status == 400
        assert thread.json["error"]["details"] == {"error_code": "thread_unsupported_request"}
        for method in ("GET", "DELETE"):
            gone = served.request(method, "/v1/responses/resp_1")
            assert (gone.status, gone.code) == (404, "response_not_found")
            assert "--store" in gone.json["error"]["message"]


def message(here: LiveServer, key: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": "oracle", "messages": messages, "temperature": 0, "max_tokens": 12, **more}
    return here.post("/v1/messages", body, x_api_key=key)


def test_a_thread_goes_on_with_its_system_text_and_tools(here: LiveServer, keys: dict[str, str]) -> None:
    began: dict[str, Any] = {
        "system": "be brief",
        "tools": [{"name": "find", "description": "Finds.", "input_schema": PLACE}],
    }
    hello, more = ({"role": "user", "content": text} for text in ("hello", "more"))
    first = message(here, keys["alice"], [hello], thread={"type": "create"}, tool_choice={"type": "none"}, **began).json
    thread = {"type": "continue", "previous_message_id": first["id"]}
    second = message(here, keys["alice"], [more], thread=thread, tool_choice={"type": "none"}).json
    history = [hello, {"role": "assistant", "content": first["content"]}, more]
    whole = message(here, keys["alice"], history, tool_choice={"type": "none"}, **began).json
    assert _num_prompt_tokens(second) == _num_prompt_tokens(whole)
    assert second["content"] == whole["content"]
    counting = {"model": "oracle", "messages": [more], "thread": thread, "tool_choice": {"type": "none"}}
    counted = here.post("/v1/messages/count_tokens", counting, x_api_key=keys["alice"]).json
    assert counted["input_tokens"] == _num_prompt_tokens(whole)
    lost = here.post("/v1/messages/count_tokens", counting, x_api_key=keys["bob"])
    assert (lost.status, lost.json["error"]["details"]) == (404, {"error_code": "thread_not_found"})


def _num_prompt_tokens(told: Any) -> int:
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(told["usage"][name] for name in names)


def test_a_thread_that_is_not_there_is_told_as_clients_look_for_it(here: LiveServer, keys: dict[str, str]) -> None:
    hello = [{"role": "user", "content": "hello"}]
    first = message(here, keys["alice"], hello, thread={"type": "create"}).json
    thread = {"type": "continue", "previous_message_id": first["id"]}
    assert message(here, keys["alice"], hello, thread=thread).status == 200
    for answer_id in (first["id"], "msg_none", None, 7):
        refused = message(here, keys["bob"], hello, thread={**thread, "previous_message_id": answer_id})
        assert refused.status == 404
        assert refused.json["error"]["details"] == {"error_code": "thread_not_found"}
    assert message(here, keys["alice"], hello, thread={"type": "fork"}).status == 400


def kept(text: str) -> KeptConversation:
    return KeptConversation([{"role": "user", "content": text}])


def test_what_could_not_be_kept_is_not_counted(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    store.keep("alice", "a", kept("hello"))
    before = store.num_bytes
    with pytest.raises(sqlite3.Error):
        store.keep("alice", "a", kept("twice the same id"))
    assert store.num_bytes == before
    store.close()


def test_what_is_forgotten_takes_no_room(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    store.keep("alice", "a", kept("hello"))
    before = store.num_bytes
    store.keep("alice", "b", kept("more"))
    for tenant, answer_id in (("bob", "b"), ("alice", "b"), ("alice", "b"), ("alice", "none")):
        store.forget(tenant, answer_id)
    assert store.num_bytes == before
    assert (store.find("alice", "a"), store.find("alice", "b")) == (kept("hello"), None)
    store.close()


def test_conversations_outlive_the_server(tmp_path: Path) -> None:
    path = tmp_path / "below" / "kept.db"
    first = ConversationStore(path, 1 << 20)
    first.keep("alice", "a", kept("hello"))
    first.close()
    again = ConversationStore(path, 1 << 20)
    assert again.find("alice", "a") == kept("hello")
    assert again.find("bob", "a") is None
    again.close()
    assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}


def test_a_store_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    path.touch(0o640)
    path.chmod(0o640)
    with raises_code(ConfigError, "store_not_private") as told:
        ConversationStore(path, 1 << 20)
    assert told.value.settings == ("store",)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"no database" * 200)])
def test_what_is_no_store_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "kept.db")
    (tmp_path / "kept.db").chmod(0o700 if (tmp_path / "kept.db").is_dir() else 0o600)
    with raises_code(ConfigError, "invalid_config"):
        ConversationStore(tmp_path / "kept.db", 1 << 20)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=40))
def test_whoever_takes_most_loses_its_oldest(asked: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder:
        store = ConversationStore(Path(folder) / "kept.db", MAX_BYTES)
        told: dict[str, list[str]] = {"a": [], "b": [], "c": []}
        for at, (tenant, size) in enumerate(asked):
            store.keep(tenant, str(at), kept(str(at) * size))
            told[tenant].append(str(at))
            assert store.num_bytes <= MAX_BYTES
            assert store.find(tenant, str(at)) is not None, "the newest stays"
        for tenant, ids in told.items():
            found = [store.find(tenant, one) is not None for one in ids]
            assert found == sorted(found), "the oldest went first"
        store.close()
