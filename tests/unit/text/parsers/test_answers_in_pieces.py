"""Whatever an answer means comes out of it, however it was cut into pieces."""

import json
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.parsers.parts import REASONING, TEXT, ToolCallPart
from quire.text.parsers.reader import AnswerFormat, AnswerReader, PartDelta
from quire.text.parsers.tool_format import ReasoningFormat
from tests.support.servers.tool_formats import FORMATS, Call, written

THOUGHTS = ReasoningFormat("<think>", "</think>")
LETTERS = st.text(st.sampled_from('ab<>/{}[]"\\:, \n`='), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | LETTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    Call,
    st.sampled_from(["get", "mcp__a-b.c"]),
    st.dictionaries(st.sampled_from(["a", "b c", "some_key"]), VALUES, max_size=3),
)


def read(fmt: AnswerFormat, pieces: Sequence[str]) -> list[tuple[object, str]]:
    """Parts and what was said of each, joined."""
    reader = AnswerReader(fmt, lambda index: f"call {index}")
    said: list[PartDelta] = [one for piece in pieces for one in reader.push(piece)] + reader.finish()
    return [(part, "".join(one.delta for one in run)) for part, run in groupby(said, key=lambda one: one.part)]


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:stop] for start, stop in pairwise(borders)]


def plain_text(text: str) -> str:
    """A text in which nothing begins that is no text."""
    return "".join(one for one in text if one not in "<[{").strip()


@pytest.mark.parametrize("name", FORMATS)
@given(text=LETTERS, thought=LETTERS, calls=st.lists(CALLS, min_size=1, max_size=3), places=st.lists(st.integers(0)))
def test_thoughts_texts_and_calls_come_out_as_they_were_meant(
    name: str, text: str, thought: str, calls: list[Call], places: list[int]
) -> None:
    fmt, text, thought = FORMATS[name], plain_text(text), plain_text(thought)
    calls = calls[:1] if fmt.call_separator is None else calls
    text = text if fmt.marker else ""
    if fmt.tagged is not None:
        calls = [Call(call.name, {key: _tame(value) for key, value in call.arguments.items()}) for call in calls]
    keys = frozenset({"a", "b c", "some_key"})
    # Between tags a text has no quotes: which arguments are texts is the same in all calls of a tool.
    texts = {call.name: frozenset(key for key in keys if isinstance(call.arguments.get(key), str)) for call in calls}
    calls = [call for call in calls if texts[call.name] == _texts(call)]
    if not calls:
        return
    answer = f"<think>\n{thought}\n</think>\n\n{text}\n" + written(fmt, calls)
    whole = AnswerFormat(reasoning=THOUGHTS, tools=fmt, text_keys=texts)
    parts = read(whole, cut(answer, places))
    assert parts == read(whole, [answer])
    told = [said for part, said in parts if part == REASONING], [said for part, said in parts if part == TEXT]
    assert told == ([thought] if thought else [], [text] if text else [])
    heard = [(part, said) for part, said in parts if isinstance(part, ToolCallPart)]
    assert [part.name for part, _ in heard] == [call.name for call in calls]
    assert [part.call_index for part, _ in heard] == list(range(len(calls)))
    assert [json.loads(said) for _, said in heard] == [call.arguments for call in calls]


def _texts(call: Call) -> frozenset[str]:
    return frozenset(key for key, value in call.arguments.items() if isinstance(value, str))


def _tame(value: Any) -> Any:
    """Without the tag that ends a value, which a text between tags cannot have."""
    return value.replace("<", "(") if isinstance(value, str) else value


@given(text=st.text(st.sampled_from('<tol_ca>[TOLCS]{"nme: \n'), max_size=30), places=st.lists(st.integers(0)))
@pytest.mark.parametrize("name", FORMATS)
def test_any_text_at_all_is_read_the_same_however_it_is_cut(name: str, text: str, places: list[int]) -> None:
    fmt = AnswerFormat(reasoning=THOUGHTS, tools=FORMATS[name])
    assert read(fmt, cut(text, places)) == read(fmt, [text])


BLANKS = st.text(st.sampled_from(" \n\t"), max_size=3)


@given(
    text=LETTERS,
    call=CALLS,
    fence=st.sampled_from(["", "```json\n", "```\n"]),
    blanks=st.lists(BLANKS, min_size=9, max_size=9),
    behind=st.sampled_from(["", "}", "\n}\n```"]),
    places=st.lists(st.integers(0)),
)
def test_a_call_that_is_an_object_is_known_without_its_mark(
    text: str, call: Call, fence: str, blanks: list[str], behind: str, places: list[int]
) -> None:
    text = plain_text(text).strip("` \n")
    words = ["{", '"name"', ":", f'"{call.name}"', ",", '"arguments"', ":", json.dumps(call.arguments)]
    answer = f"{text}\n{fence}" + "".join(map("".join, zip(words, blanks, strict=False))) + behind
    fmt = AnswerFormat(tools=FORMATS["hermes"], text_keys={"get": frozenset(), "mcp__a-b.c": frozenset()})
    parts = read(fmt, cut(answer, places))
    assert parts == read(fmt, [answer])
    assert [said for part, said in parts if part == TEXT] == ([text] if text else [])
    [(part, said)] = [(part, said) for part, said in parts if isinstance(part, ToolCallPart)]
    assert (part.name, json.loads(said)) == (call.name, call.arguments)


WORDS = ("```", "json", "\n", "{", '"name"', ":", '"get"', '"got"', ",", '"arguments"', "x")


@given(st.lists(st.sampled_from(WORDS), max_size=14), st.lists(st.integers(0)))
def test_what_only_looks_like_a_call_stays_a_text(words: list[str], places: list[int]) -> None:
    text = "".join(words)
    fmt = AnswerFormat(tools=FORMATS["hermes"], text_keys={"never": frozenset()})
    assert "".join(said for _, said in read(fmt, cut(text, places))) == text


@given(LETTERS, st.lists(st.integers(0)))
def test_an_answer_without_thoughts_and_calls_is_its_text(text: str, places: list[int]) -> None:
    fmt = AnswerFormat(reasoning=THOUGHTS, tools=FORMATS["hermes"])
    assert "".join(said for _, said in read(fmt, cut(text, places))) == text
