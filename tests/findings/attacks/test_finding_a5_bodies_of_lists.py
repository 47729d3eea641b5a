"""A body of a million lists costs others nothing: a parser holds the interpreter's lock while it makes them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.dialects.openai.fields import grammar_of
from quire.api.dialects.openai.schemas import CompletionFields
from quire.api.http.body import parse_object
from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_JSON_DEPTH, MAX_JSON_LISTS
from quire.text.chat.rendering.messages import prepare_messages, read_arguments
from tests.support.errors import raises_code

TEXTS = st.text(st.sampled_from('ab[]{}"\\,: é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    value: Any = "[[["
    for _ in range(depth):
        value = [value]
    return value


def is_refused(value: object) -> bool:
    try:
        parse_object(json.dumps(value).encode())
    except ApiError:
        return True
    return False


@given(VALUES, st.booleans())
def test_what_stands_in_texts_is_no_list(value: Any, is_plain: bool) -> None:
    body = {"a": value, "lists": [[]] * MAX_JSON_DEPTH}
    assert parse_object(json.dumps(body, ensure_ascii=is_plain).encode()) == body


@given(VALUES, st.integers(MAX_JSON_DEPTH - 3, MAX_JSON_DEPTH + 3))
def test_depth_is_that_of_the_deepest_wherever_it_stands(value: Any, depth: int) -> None:
    body = {"a": value, "b": nested(depth - 1), "c": value}
    assert is_refused(body) == (depth > MAX_JSON_DEPTH)


MILLION = '{"lists": [' + "[], " * 450_000 + "[]]}"


def test_arguments_of_a_million_lists_stay_a_text() -> None:
    function = {"name": "f", "arguments": MILLION}
    (message,) = prepare_messages(
        [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}], wants_parts=False
    )
    assert message["tool_calls"] == [{"function": function}]
    code = json.dumps({"code": "[{" * MAX_JSON_LISTS})
    assert read_arguments(code) == {"code": "[{" * MAX_JSON_LISTS}


def test_a_schema_of_a_million_lists_is_refused_before_one_is_made() -> None:
    fields = CompletionFields.model_validate({"prompt": "a", "guided_json": MILLION})
    with pytest.raises(ApiError) as refused:
        grammar_of(fields)
    assert refused.value.param == "guided_json"


def test_a_body_of_a_million_lists_is_refused_before_one_is_made() -> None:
    body = json.dumps({"lists": [[]] * 450_000}).encode()
    with raises_code(ApiError, "invalid_json"):
        parse_object(body)
