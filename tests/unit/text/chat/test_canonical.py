"""What clients spell in several ways is one conversation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidTextError
from quire.text.chat.canonical import TemplateSupport, canonical, short_id
from quire.text.chat.rendering.messages import prepare_messages
from quire.text.chat.tools import Tool, with_written_tools


def said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    assert canonical([said("developer"), said("user")], TemplateSupport()) == [said("system"), said("user")]
    assert canonical([said("developer")], TemplateSupport(has_developer=True)) == [said("developer")]


def test_system_messages_at_the_start_are_one() -> None:
    told = canonical([said("system", "a"), said("developer", "b"), said("user")], TemplateSupport())
    assert told == [said("system", "a\n\nb"), said("user")]


@pytest.mark.parametrize(("shows", "role"), [(True, "system"), (False, "user")])
def test_a_late_system_message_is_a_users_where_the_template_does_not_show_it(shows: bool, role: str) -> None:
    told = canonical([said("system"), said("user"), said("system", "late")], TemplateSupport(has_late_system=shows))
    assert told[2] == said(role, "late")
    assert told[0]["role"] == "system"


def test_thoughts_have_one_name() -> None:
    (told,) = canonical([said("assistant", reasoning="hm")], TemplateSupport())
    assert told["reasoning_content"] == "hm"


def test_thoughts_are_given_under_every_name_that_templates_read() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        (told,) = canonical([said("assistant", **{name: "hm"})], TemplateSupport())
        assert (told["reasoning_content"], told["thinking"]) == ("hm", "hm")
    (told,) = canonical([said("assistant", thinking=None)], TemplateSupport())
    assert "reasoning_content" not in told


def test_ids_are_short_where_they_must_be_and_stay_what_they_are() -> None:
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [said("assistant", "", tool_calls=[call]), said("tool", "y", tool_call_id=call["id"])]
    assert canonical(messages, TemplateSupport()) == messages
    first, second = canonical(messages, TemplateSupport(needs_short_ids=True))
    assert first["tool_calls"][0]["id"] == second["tool_call_id"] == short_id(str(call["id"]))
    assert len(second["tool_call_id"]) == 9
    assert short_id(second["tool_call_id"]) == second["tool_call_id"]


def test_what_is_no_message_is_left_to_others() -> None:
    assert canonical(["x"], TemplateSupport()) == ["x"]  # type: ignore[list-item]


def test_tools_are_told_before_the_system_text_and_calls_are_texts() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [said("system", "be kind"), said("assistant", None, tool_calls=[call]), said("tool", "two")]
    system, answer, result = with_written_tools(messages, [Tool("f", "does")])
    assert system["content"].endswith("\n\nbe kind")
    assert '"name": "f", "description": "does"' in system["content"]
    assert answer["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert result == said("user", "<tool_response>\ntwo\n</tool_response>")


def test_without_a_system_text_one_is_made_for_tools() -> None:
    system, user = with_written_tools([said("user", [{"type": "text", "text": "hi"}])], [Tool("f")])
    assert (system["role"], user["role"]) == ("system", "user")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "function"]), inner),
    max_leaves=6,
)


@given(st.sampled_from(["system", "user", "assistant", "tool"]), ANYTHING, ANYTHING)
def test_a_message_that_is_none_is_refused_where_tools_are_written_too(role: str, content: Any, calls: Any) -> None:
    message = said(role, content, tool_calls=calls)
    try:
        told = prepare_messages(with_written_tools([message], [Tool("f")]), wants_parts=False)
    except InvalidTextError:
        return
    assert all(isinstance(one["content"], str) for one in told)
    assert not isinstance(calls, bool | float | int | str | dict) or not calls or role == "tool"
