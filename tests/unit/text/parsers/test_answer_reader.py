"""Corners of reading an answer; that cuts do not matter is in `unit/text/test_answers_in_pieces.py`."""

from itertools import groupby

import pytest

from quire.text.parsers.parts import REASONING, TEXT, Part, ToolCallPart
from quire.text.parsers.reader import AnswerFormat, AnswerReader
from quire.text.parsers.tool_format import HARMONY, HARMONY_REASONING, HERMES, ReasoningFormat
from tests.support.servers.tool_formats import FORMATS

THOUGHTS = ReasoningFormat("<think>", "</think>")


def read(fmt: AnswerFormat, text: str) -> list[tuple[Part, str]]:
    reader = AnswerReader(fmt, lambda index: f"call {index}")
    said = [*reader.push(text), *reader.finish()]
    return [(part, "".join(one.delta for one in run)) for part, run in groupby(said, key=lambda one: one.part)]


def test_a_prompt_that_ends_inside_a_thought_makes_the_answer_begin_with_it() -> None:
    fmt = AnswerFormat(reasoning=THOUGHTS, is_thinking=True)
    assert read(fmt, "hm\n</think>\n\nyes") == [(REASONING, "hm"), (TEXT, "yes")]
    assert read(AnswerFormat(reasoning=THOUGHTS), "hm\n</think>\n\nyes") == [(TEXT, "hm\n</think>\n\nyes")]


def test_a_thought_that_breaks_off_is_a_thought() -> None:
    assert read(AnswerFormat(reasoning=THOUGHTS), "<think>so far </thi") == [(REASONING, "so far </thi")]


def test_white_space_at_the_end_of_a_text_stays_unless_a_call_follows() -> None:
    fmt = AnswerFormat(tools=HERMES)
    assert read(fmt, " a b \n") == [(TEXT, " a b \n")]
    text, call = read(fmt, 'a \n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert text == (TEXT, "a")
    assert call == (ToolCallPart(0, "call 0", "f"), "{}")


def test_a_call_that_breaks_off_keeps_what_came() -> None:
    (call,) = read(AnswerFormat(tools=HERMES), '<tool_call>\n{"name": "f", "arguments": {"a": "x')
    assert call == (ToolCallPart(0, "call 0", "f"), '{"a": "x')


def test_half_a_mark_at_the_end_is_text() -> None:
    assert read(AnswerFormat(tools=HERMES), "1 <tool_c") == [(TEXT, "1 <tool_c")]


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert read(AnswerFormat(), text) == [(TEXT, text)]


def test_an_id_that_the_model_writes_before_the_arguments_is_the_calls() -> None:
    (call,) = read(AnswerFormat(tools=FORMATS["ids"]), '[TOOL_CALLS]f[CALL_ID]abcdefgh9[ARGS]{"a": 1}')
    assert call == (ToolCallPart(0, "abcdefgh9", "f"), '{"a": 1}')


def test_an_id_behind_the_arguments_comes_too_late() -> None:
    (call,) = read(
        AnswerFormat(tools=FORMATS["list"]), '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefgh9"}]'
    )
    assert call == (ToolCallPart(0, "call 0", "f"), "{}")


@pytest.mark.parametrize("text", ['{"nam', '{"named": 1}', 'x {"name": "f", "parameters": {}}'])
def test_without_a_mark_only_an_answer_that_begins_like_a_call_is_one(text: str) -> None:
    assert read(AnswerFormat(tools=FORMATS["bare"]), text) == [(TEXT, text)]


def test_channels_are_thoughts_texts_and_calls() -> None:
    fmt = AnswerFormat(reasoning=HARMONY_REASONING, tools=HARMONY)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert read(fmt, thought + "<|channel|>final<|message|>yes") == [(REASONING, "hm"), (TEXT, "yes")]
    assert read(fmt, "<|channel|>final<|message|>yes") == [(TEXT, "yes")]
    called = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    assert read(fmt, thought + called) == [(REASONING, "hm"), (ToolCallPart(0, "call 0", "f"), '{"a": 1}')]
