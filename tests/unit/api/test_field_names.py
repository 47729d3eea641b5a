"""Which names of a body's fields are refused, and which are named: over every dialect's tables."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.dialects.anthropic.schemas import COUNT_NAMES, MESSAGES_NAMES
from quire.api.dialects.field_names import FieldNames, ignored_headers, ignored_names, is_one_edit
from quire.api.dialects.foreign_fields import ALL_FOREIGN
from quire.api.dialects.openai.fields import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    DETOKENIZE_NAMES,
    RESPONSE_NAMES,
    TOKENIZE_NAMES,
)
from quire.api.http.errors import ApiError

TABLES = (CHAT_NAMES, COMPLETION_NAMES, RESPONSE_NAMES, MESSAGES_NAMES, COUNT_NAMES, TOKENIZE_NAMES, DETOKENIZE_NAMES)
LETTERS = "abc"


def edits(word: str) -> set[str]:
    """All that one mistake makes of a word."""
    found = {word[:at] + one + word[at:] for at in range(len(word) + 1) for one in LETTERS}
    found |= {word[:at] + word[at + 1 :] for at in range(len(word))}
    found |= {word[:at] + one + word[at + 1 :] for at in range(len(word)) for one in LETTERS}
    found |= {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    return found - {word}


@pytest.mark.parametrize("length", range(5))
def test_one_edit_is_exactly_a_letter_more_or_less_or_another_or_two_changed(length: int) -> None:
    for word in map("".join, product(LETTERS, repeat=length)):
        near = edits(word)
        for size in range(max(0, length - 2), length + 3):
            for other in map("".join, product(LETTERS, repeat=size)):
                if other != word:
                    assert is_one_edit(word, other) == (other in near), (word, other)


@pytest.mark.parametrize("table", TABLES)
def test_what_another_server_or_another_route_knows_is_never_a_mistake(table: FieldNames) -> None:
    others = ALL_FOREIGN.union(*(one.read for one in TABLES))
    assert {*ignored_names(dict.fromkeys(others), table)} == others - table.read


@given(st.sampled_from(TABLES), st.data())
def test_a_name_is_read_or_named_or_refused(table: FieldNames, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(table.read)))
    at, letter = data.draw(st.integers(0, len(name))), data.draw(st.characters(exclude_categories=["Cs"]))
    wrong = data.draw(st.sampled_from([name[:at] + letter + name[at:], name[:at] + name[at + 1 :], name[::-1]]))
    is_near = any(is_one_edit(wrong, one) for one in table.read)
    if wrong in table.read or len(wrong) < 5 or wrong in ALL_FOREIGN or not is_near:
        assert ignored_names({wrong: 1}, table) == (() if wrong in table.read else (wrong,))
        return
    with pytest.raises(ApiError) as refusal:
        ignored_names({wrong: 1}, table)
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (400, "unknown_parameter", wrong[:100])


@given(st.lists(st.text(max_size=100), unique=True, max_size=20))
def test_a_head_names_all_of_them_in_plain_characters(names: list[str]) -> None:
    for _, value in ignored_headers(tuple(names)):
        assert value.decode("ascii").isprintable()
        assert len(value.decode().split(", ")) == len(names)


def test_objects_inside_are_looked_at_and_what_a_template_may_read_is_let_through() -> None:
    body = {
        "messages": [{"role": "user", "content": [], "of_the_template": 1}, "no object"],
        "tools": [{"type": "web_search", "functoin": 1}, {"function": {"x": 1}}, {"function": {"x": 2}}],
        "response_format": {"json_schema": {"schema": {"anything": 1}, "y": 1}},
        "tool_choice": {"type": "allowed_tools", "z": 1},
        "logit_bias": {"anything": 1},
    }
    told = ("tools.type='web_search'", "tools.function.x", "response_format.json_schema.y", "tool_choice.z")
    assert ignored_names(body, CHAT_NAMES) == told
