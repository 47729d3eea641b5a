"""The cache contracts of both clouds: written tokens are counted, and a miss after a named response has its cause."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from quire.core.memory.kv_memory import KVMemory
from tests.api.dialects.test_messages import TOOLS, events
from tests.api.dialects.test_tools import tool_talker
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SYSTEM = "You are a patient librarian, and you answer in one or two friendly sentences."
TURNS = [
    {"role": "user", "content": "When does the library open on a rainy Sunday?"},
    {"role": "assistant", "content": "It opens at ten in the morning."},
    {"role": "user", "content": "And where is the shelf with the atlases?"},
]


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house(models={"oracle": tool_talker(), "other": talker(num_blocks=512, max_sequence_tokens=1536)}) as served:
        yield served


def body(**more: Any) -> dict[str, Any]:
    return {"model": "oracle", "max_tokens": 2, "system": SYSTEM, "tools": TOOLS, "messages": TURNS, **more}


def follow(here: LiveServer, previous: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The message that follows a request, and names its response."""
    first = here.post(MESSAGES, previous).json
    reply = here.post(MESSAGES, {**previous, **more, "diagnostics": {"previous_message_id": first["id"]}})
    assert reply.status == 200, reply.data
    message: dict[str, Any] = reply.json
    return message


def reason(message: dict[str, Any]) -> Any:
    return None if message["diagnostics"] is None else message["diagnostics"]["cache_miss_reason"]["type"]


def changed(turn: int, text: str) -> list[dict[str, Any]]:
    return [{**TURNS[turn], "content": text} if index == turn else one for index, one in enumerate(TURNS)]


CHANGES: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "messages appended": ({"messages": [*TURNS, {"role": "assistant", "content": "Up."}, TURNS[0]]}, None),
    "a moved hint": ({"system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]}, None),
    "sampling": ({"temperature": 0.3, "top_k": 4, "metadata": {"user_id": "x"}}, None),
    "the system text": ({"system": "Hush. " + SYSTEM}, "system_changed"),
    "no system text": ({"system": None}, "system_changed"),
    "fewer tools": ({"tools": TOOLS[:1]}, "tools_changed"),
    "no tools": ({"tools": []}, "tools_changed"),
    "tools in another order": ({"tools": TOOLS[::-1]}, "tools_changed"),
    "an earlier message": ({"messages": changed(0, "When does the museum open?")}, "messages_changed"),
    "a role": ({"messages": [TURNS[0], {**TURNS[1], "role": "user"}, TURNS[2]]}, "messages_changed"),
    "another model": ({"model": "other", "tools": []}, "model_changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_messages_report_the_cause_of_a_miss_and_of_no_hit(here: LiveServer, change: str) -> None:
    more, expected = CHANGES[change]
    # A text of its own: what other cases have cached must not make a hit of a miss.
    own = {"system": f"Case {change!r}. {SYSTEM}"}
    more = {
        **more,
        **({"system": own["system"].replace("Case", "case")} if isinstance(more.get("system"), str) else {}),
    }
    if isinstance(more.get("system"), list):
        more["system"] = [{**more["system"][0], "text": own["system"]}]
    message = follow(here, body(**own), **more)
    assert reason(message) == expected, message
    if expected is not None:
        missed = message["diagnostics"]["cache_miss_reason"]["cache_missed_input_tokens"]
        assert 0 < missed <= message["usage"]["input_tokens"] + message["usage"]["cache_creation_input_tokens"]
        assert message["diagnostics"]["cache_explain"]["lost_tokens"] > 0


def test_an_unknown_message_is_not_found_and_no_message_opts_in(here: LiveServer) -> None:
    message = here.post(MESSAGES, body(diagnostics={"previous_message_id": "msg_none"})).json
    assert message["diagnostics"]["cache_miss_reason"] == {"type": "previous_message_not_found"}
    for diagnostics in (None, {}, {"previous_message_id": None}):
        assert here.post(MESSAGES, body(diagnostics=diagnostics)).json["diagnostics"] is None
    assert here.post(MESSAGES, body(diagnostics={"previous_message_id": 3})).status == 400


def test_an_eviction_has_no_name_in_the_api_and_its_own_beside_it() -> None:
    with house(models={"oracle": tool_talker()}) as here:
        first = here.post(MESSAGES, body()).json
        client = here.opened["oracle"].engine.memory

        async def evict() -> None:
            client.evict(512)

        here.wait_until_free()
        here.run(evict)
        message = here.post(MESSAGES, body(diagnostics={"previous_message_id": first["id"]})).json
    assert message["diagnostics"]["cache_miss_reason"] == {"type": "unavailable"}
    assert message["diagnostics"]["cache_explain"]["reason"] == "evicted"


def test_a_stream_has_the_cause_in_its_first_event(here: LiveServer) -> None:
    first = here.post(MESSAGES, body(system="Streams. " + SYSTEM)).json
    asked = body(system="Begins otherwise.", stream=True, diagnostics={"previous_message_id": first["id"]})
    start, *_, end, _stop = events(here.post(MESSAGES, asked).data)
    assert start["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    assert "diagnostics" not in end
    usage = start["message"]["usage"]
    assert usage["cache_creation_input_tokens"] == end["usage"]["cache_creation_input_tokens"] > 0


def test_what_is_written_and_what_is_read_add_up(here: LiveServer) -> None:
    asked = body(system="Adds up. " + SYSTEM)
    cold, warm = (here.post(MESSAGES, asked).json["usage"] for _ in range(2))
    counted = here.post(f"{MESSAGES}/count_tokens", {k: v for k, v in asked.items() if k != "max_tokens"}).json
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert {sum(usage[name] for name in names) for usage in (cold, warm)} == {counted["input_tokens"]}
    assert warm["cache_creation_input_tokens"] == 0, "every block was cached before"


# -- Responses -----------------------------------------------------------------------------------------------------


def items(text: str) -> list[dict[str, Any]]:
    return [
        {"role": turn["role"], "content": turn["content"] + text * (index == 0)} for index, turn in enumerate(TURNS)
    ]


FUNCTIONS = [{"type": "function", "name": "paint", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"type": "cache_hit"}),
        ({"prompt_cache_key": "another", "service_tier": "flex", "text": {"verbosity": "low"}}, {"type": "cache_hit"}),
        ({"input": items(" Please.")}, "input_changed"),
        ({"instructions": "Be quick."}, "input_changed"),
        ({"tools": FUNCTIONS}, "tools_changed"),
        ({"model": "other"}, "model_changed"),
    ],
)
def test_responses_report_the_cause_of_a_miss(here: LiveServer, more: dict[str, Any], expected: Any) -> None:
    sdk = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
    own = f"Case {expected} {sorted(more)}. {SYSTEM}"
    asked = {
        "model": "oracle",
        "instructions": own,
        "input": items(""),
        "max_output_tokens": 2,
        "prompt_cache_key": "k",
    }
    first = sdk.responses.create(**asked)
    options = {"mode": "implicit", "comparison_response_id": first.id}
    second: Any = sdk.responses.create(**{**asked, **more}, extra_body={"prompt_cache_options": options})
    diagnostics = second.model_dump()["prompt_cache_diagnostics"]
    details = second.usage.input_tokens_details.model_dump()
    assert second.model_dump()["prompt_cache_options"] == {**options, "ttl": "30m"}
    assert second.prompt_cache_key == more.get("prompt_cache_key", "k")
    if isinstance(expected, dict):
        assert diagnostics == expected
        assert details["cache_write_tokens"] == 0
        return
    assert (diagnostics["type"], diagnostics["reason"]) == ("cache_miss", expected)
    assert diagnostics["cache_missed_tokens"] > 0
    assert diagnostics["comparison_reusable_tokens"] >= 0
    assert details["cache_write_tokens"] > 0


def test_an_unknown_response_is_not_found(here: LiveServer) -> None:
    options = {"comparison_response_id": "resp_none"}
    asked = {"model": "oracle", "input": "hello", "max_output_tokens": 2}
    told = here.post(RESPONSES, {**asked, "prompt_cache_options": options}).json
    assert told["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"
    assert here.post(RESPONSES, asked).json["prompt_cache_diagnostics"] is None
    assert here.post(RESPONSES, {**asked, "prompt_cache_options": {"ttl": "5h"}}).status == 400


# -- kept prefixes -------------------------------------------------------------------------------------------------


def keep(ttl: str | None, **more: Any) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **({} if ttl is None else {"ttl": ttl})}, **more}


def flood(here: LiveServer, num_blocks: int) -> None:
    """Evict what nothing keeps."""
    here.wait_until(lambda: not here.opened["oracle"].engine.has_work)

    async def evict() -> None:
        here.opened["oracle"].engine.memory.evict(num_blocks)

    here.run(evict)


def test_a_breakpoint_with_a_ttl_keeps_the_prompt_and_one_without_is_only_a_mark() -> None:
    with house(models={"oracle": tool_talker()}) as here:
        memory = here.opened["oracle"].engine.memory
        for ttl in (None, "1h"):
            system = [{"type": "text", "text": SYSTEM, **keep(ttl)}]
            usage = here.post(MESSAGES, body(system=system, tools=[])).json["usage"]
            assert ("cache_pinned_tokens" in usage) == (ttl is not None)
            flood(here, 512)
            told = here.post(MESSAGES, body(messages=TURNS[:1], tools=[])).json["usage"]
            assert (told["cache_read_input_tokens"] > 0) == (ttl is not None)
        assert told["cache_read_input_tokens"] >= usage["cache_pinned_tokens"] > 0
        whole = here.post(MESSAGES, body(**keep("5m"), tools=[])).json["usage"]
        flood(here, 512)
        again = here.post(MESSAGES, body(tools=[])).json["usage"]
        assert again["cache_read_input_tokens"] == (sum_of(again) - 1) // 4 * 4
        assert whole["cache_pinned_tokens"] == sum_of(again) // 4 * 4
        assert len(memory.pins.tables) == 2, "the shorter one lasts longer"
        beyond = here.post(MESSAGES, body(**keep("5m"), system="Beyond. " + SYSTEM)).json["usage"]
        assert 0 < beyond["cache_pinned_tokens"] < sum_of(beyond), "it is shortened to the budget, and no error"
        assert memory.pins.num_pinned_blocks == memory.pins.budget_blocks
        here.run(lambda: cleared(memory))


async def cleared(memory: KVMemory) -> None:
    memory.clear()


def sum_of(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


def test_a_ttl_that_is_none_is_refused(here: LiveServer) -> None:
    for ttl in ("13h", "0m", "soon", 5):
        marked = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": ttl}}]
        reply = here.post(MESSAGES, body(messages=[{"role": "user", "content": marked}]))
        assert reply.status == 400, ttl


def test_a_response_keeps_its_breakpoints_and_shows_how_much_is_kept() -> None:
    def asked(mark: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        part = {"type": "input_text", "text": "A long text about atlases. " * 4}
        first = {"role": "user", "content": [part if mark is None else part | {"prompt_cache_breakpoint": mark}]}
        return {
            "model": "oracle",
            "max_output_tokens": 2,
            "input": [first, *items("")[1:]],
            "prompt_cache_options": options,
        }

    with house(models={"oracle": tool_talker()}) as here:
        for mark, options, is_kept in (
            (None, {}, False),
            ({"mode": "explicit"}, {}, False),
            ({"mode": "explicit", "ttl": "12h"}, {}, True),
            ({"mode": "explicit"}, {"ttl": "30m", "mode": "explicit"}, True),
            (None, {"ttl": "30m"}, True),
            (None, {"ttl": "30m", "mode": "explicit"}, False),
        ):
            told = here.post(RESPONSES, asked(mark, **options))
            assert told.status == 200, told.data
            details = told.json["usage"]["input_tokens_details"]
            assert (details.get("pinned_tokens", 0) > 0) == is_kept, (mark, options)
            flood(here, 512)
            stats = here.opened["oracle"].engine.memory.stats()
            assert (stats.num_pinned_blocks > 0) == is_kept
            memory = here.opened["oracle"].engine.memory
            here.run(partial(cleared, memory))
