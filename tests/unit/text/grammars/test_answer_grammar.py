"""What an answer may be, asked of the library that follows it: whole answers, and where they go wrong."""

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.checkpoints.grammar_vocabulary import matcher_of
from quire.text.grammars.answer_grammar import AnswerRules, CallableTool, ToolRules, answer_grammar, text_keys
from quire.text.parsers.tool_format import HARMONY, HARMONY_REASONING, HERMES, ReasoningFormat, ToolFormat
from tests.support.core.grammars import small_vocabulary
from tests.support.models.small_tokenizers import byte_level
from tests.support.servers.tool_formats import FORMATS, Call, written

WEATHER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [CallableTool("weather", WEATHER), CallableTool("ping", {"type": "object", "properties": {}})]
BONN = Call("weather", {"city": "Bonn", "unit": "c", "days": 3})
SHORT = Call("weather", {"city": "B"})
THOUGHTS = ReasoningFormat("<think>", "</think>")


def fits(rules: AnswerRules, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = matcher_of(small_vocabulary(), LLMatcher.grammar_from_lark(answer_grammar(rules, {})))
    assert not matcher.is_error(), matcher.get_error()
    ids = byte_level().encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def calling(fmt: ToolFormat, **more: Any) -> ToolRules:
    return ToolRules(fmt, TOOLS, **more)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_tools_there_are_fit_and_no_others(name: str) -> None:
    fmt = FORMATS[name]
    rules = AnswerRules(calling(fmt))
    for call in (BONN, SHORT, Call("ping", {})):
        assert fits(rules, written(fmt, [call]))
    assert fits(rules, "a text")
    assert fits(rules, "a text\n" + written(fmt, [SHORT])) or not fmt.marker
    assert not fits(rules, written(fmt, [Call("other", {})]))
    assert not fits(rules, written(fmt, [Call("weather", {"town": "Bonn"})]))
    assert not fits(rules, written(fmt, [Call("weather", {})]))
    assert not fits(rules, written(fmt, [Call("weather", {"city": "Bonn", "unit": "k"})]))
    assert not fits(rules, written(fmt, [Call("weather", {"city": "Bonn", "days": "many"})]))
    assert not fits(rules, written(fmt, [SHORT]) + "and more")


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_fit_where_the_format_and_the_request_allow_them(name: str) -> None:
    fmt = FORMATS[name]
    if fmt.call_separator is None:
        return
    assert fits(AnswerRules(calling(fmt)), written(fmt, [SHORT, BONN, SHORT]))
    assert not fits(AnswerRules(calling(fmt, is_parallel=False)), written(fmt, [SHORT, BONN]))


@pytest.mark.parametrize("name", FORMATS)
def test_where_a_call_is_wanted_no_text_fits(name: str) -> None:
    rules = AnswerRules(calling(FORMATS[name], must_call=True))
    assert fits(rules, written(FORMATS[name], [SHORT]))
    assert not fits(rules, "a text")


@pytest.mark.parametrize(
    "opening",
    [
        '{"name": "weather", "arguments": ',
        '```json\n{"name": "weather", "arguments": ',
        'I will look.\n\n```\n{\n  "name": "weather",\n  "arguments": ',
    ],
)
def test_where_a_call_is_an_object_it_needs_no_mark(opening: str) -> None:
    rules = AnswerRules(calling(HERMES))
    for end in ("}", "}\n```", "\n}\n```"):
        assert fits(rules, opening + '{"city": "Bonn"}' + end)
        assert not fits(rules, opening + '{"town": "Bonn"}' + end)
        assert not fits(rules, opening + '{"city": "Bonn"}' + end + " and more")
    assert not fits(AnswerRules(calling(HERMES, must_call=True)), opening + '{"city": "Bonn"}}')


@pytest.mark.parametrize(
    "text",
    [
        'Your package.json:\n```json\n{"name": "app", "version": "1.0"}\n```\nThat is all.',
        '{"name": "weather", "version": 3}',
        '{"name": "other", "arguments": {"town": "Bonn"}}',
        '{"name": "weather" "arguments": 7}',
    ],
)
def test_an_object_that_calls_no_tool_is_a_text(text: str) -> None:
    assert fits(AnswerRules(calling(HERMES)), text)


def test_a_thought_comes_first_if_it_comes() -> None:
    rules = AnswerRules(calling(HERMES, must_call=True), reasoning=THOUGHTS)
    assert fits(rules, "<think>hm</think>\n\n" + written(HERMES, [SHORT]))
    assert fits(rules, written(HERMES, [SHORT]))
    assert not fits(rules, "<think>hm</think>\n\nno")


def test_a_prompt_that_ends_in_a_thought_wants_its_end() -> None:
    rules = AnswerRules(calling(HERMES), reasoning=THOUGHTS, is_thinking=True)
    assert fits(rules, "hm</think>\n\nyes")
    assert not fits(rules, "yes")


END_OF_THOUGHT = "</s>"
MARKS: dict[str, int] = {END_OF_THOUGHT: byte_level().library.token_to_id(END_OF_THOUGHT) or 0}
BOUNDED = ReasoningFormat("<think>", END_OF_THOUGHT)


@given(st.integers(1, 40), st.randoms(use_true_random=False), st.booleans())
def test_a_thought_is_ended_when_its_budget_is_spent(budget: int, dice: Random, has_tools: bool) -> None:
    calls = calling(HERMES, must_call=True) if has_tools else None
    rules = AnswerRules(calls, reasoning=BOUNDED, is_thinking=True, max_thought_tokens=budget)
    matcher = matcher_of(small_vocabulary(), LLMatcher.grammar_from_lark(answer_grammar(rules, MARKS)))
    written_ids = list[int]()
    while MARKS[END_OF_THOUGHT] not in written_ids:
        allowed = _allowed(matcher)
        assert len(written_ids) < budget or allowed == {MARKS[END_OF_THOUGHT]}
        token = dice.choice(sorted(allowed - {MARKS[END_OF_THOUGHT]}) or sorted(allowed))
        assert matcher.consume_token(token)
        written_ids.append(token)
    assert len(written_ids) == budget + 1
    again = matcher_of(small_vocabulary(), LLMatcher.grammar_from_lark(answer_grammar(rules, MARKS)))
    assert again.try_consume_tokens(written_ids) == len(written_ids)
    assert _allowed(again) == _allowed(matcher)


def _allowed(matcher: LLMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: byte_level().vocabulary_size]).tolist())


def test_a_thought_within_its_budget_ends_by_itself() -> None:
    rules = AnswerRules(schema=WEATHER, reasoning=BOUNDED, is_thinking=True, max_thought_tokens=40)
    ids = byte_level().encode("hm </ so</s>\n" + '{"city": "B"}', add_special_tokens=False)
    matcher = matcher_of(small_vocabulary(), LLMatcher.grammar_from_lark(answer_grammar(rules, MARKS)))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_an_answer_in_json_may_call_instead() -> None:
    rules = AnswerRules(calling(HERMES), schema=WEATHER)
    assert fits(rules, '{"city": "Bonn"}')
    assert fits(rules, written(HERMES, [SHORT]))
    assert not fits(rules, "Bonn")


def test_a_thought_may_come_before_json() -> None:
    rules = AnswerRules(schema=WEATHER, reasoning=THOUGHTS)
    assert fits(rules, '<think>{</think>\n{"city": "Bonn"}')
    assert not fits(rules, "<think>{</think>\nBonn")


def test_without_a_mark_a_text_is_what_does_not_begin_like_a_call() -> None:
    rules = AnswerRules(calling(FORMATS["bare"]))
    assert fits(rules, '{"names": 1}')
    assert not fits(rules, '{"name": "x"}')


def test_channels_have_their_own_beginnings() -> None:
    rules = AnswerRules(calling(HARMONY), reasoning=HARMONY_REASONING)
    assert fits(rules, "<|channel|>final<|message|>yes")
    assert fits(rules, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + written(HARMONY, [SHORT]))


@pytest.mark.parametrize("name", ["hermes", "tagged"])
def test_what_the_library_does_not_know_is_passed_over_unless_a_tool_is_strict(name: str) -> None:
    strange = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    for is_strict in (False, True):
        rules = AnswerRules(ToolRules(FORMATS[name], [CallableTool("f", strange, is_strict)]))
        matcher = matcher_of(small_vocabulary(), LLMatcher.grammar_from_lark(answer_grammar(rules, {})))
        assert matcher.is_error() is is_strict


def test_texts_are_arguments_that_may_be_texts() -> None:
    kinds: dict[str, Any] = {
        "plain": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "one of": {"enum": ["a", "b"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "number": {"type": "number"},
        "mixed": {"enum": ["a", 1]},
        "anything": True,
    }
    assert text_keys({"properties": kinds}) == {"plain", "maybe", "one of", "either"}
    assert text_keys({}) == frozenset()


@pytest.mark.parametrize("odd", [True, 17, 5e-324, "string", {"type": "string"}, None, [[{"type": "string"}]]])
@pytest.mark.parametrize("name", ["type", "enum", "anyOf", "oneOf"])
def test_a_schema_that_is_none_has_no_texts_and_breaks_nothing(name: str, odd: object) -> None:
    assert text_keys({"properties": {"a": {name: odd}}}) == ({"a"} if (name, odd) == ("type", "string") else set())
