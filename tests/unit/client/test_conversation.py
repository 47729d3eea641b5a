"""What an engine is asked where a tool's schema cannot be said, judged by a checker that really compiles."""

from typing import Any

import pytest
from msgspec import json

from quire.checkpoints.grammar_vocabulary import first_mask, matcher_of
from quire.client.request.conversation import ThoughtBudget, Tool, ToolUse, chat_prompt, converse
from quire.client.request.text_model import TextModel
from quire.errors import InvalidParameterError
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.grammars.grammar import Grammar
from tests.api.dialects.test_tools import TEMPLATE
from tests.support.core.grammars import small_vocabulary
from tests.support.errors import raises_code
from tests.support.servers.talkers import talker

HELLO = [{"role": "user", "content": "hello"}]
FINE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRANGE: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}
IMPOSSIBLE: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


class CompilingChecker:
    """As the process that checks grammars does it, in this one."""

    def __init__(self) -> None:
        self.num_checked = 0

    def check(self, grammar: Grammar) -> None:
        self.num_checked += 1
        try:
            first_mask(matcher_of(small_vocabulary(), grammar.text))
        except ValueError as error:
            raise InvalidParameterError(str(error), grammar.parameter) from None

    def close(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def model() -> TextModel:
    opened = talker()
    checker: Any = CompilingChecker()
    text = opened.text
    return TextModel(
        "m", opened.engine.info, text.tokenizer, ChatTemplate(TEMPLATE, {}), text.eos_token_ids, {}, checker
    )


def grammar_of(model: TextModel, *tools: Tool) -> str:
    grammar = converse(model, HELLO, ToolUse(tools)).grammar
    assert grammar is not None
    return grammar.text


def test_a_schema_that_can_be_said_is(model: TextModel) -> None:
    assert "integer" in grammar_of(model, Tool("f", parameters=FINE))


def test_one_that_cannot_is_any_object_and_the_others_stay(model: TextModel) -> None:
    told = grammar_of(model, Tool("f", parameters=IMPOSSIBLE), Tool("g", parameters=FINE))
    assert "nowhere" not in told
    assert "integer" in told


@pytest.mark.parametrize("schema", [STRANGE, IMPOSSIBLE])
def test_a_strict_one_that_cannot_be_said_in_full_is_refused(model: TextModel, schema: dict[str, Any]) -> None:
    assert grammar_of(model, Tool("f", parameters=schema))
    with raises_code(InvalidParameterError, "strict_schema_unsupported"):
        grammar_of(model, Tool("f", parameters=schema, is_strict=True))


def test_a_prompt_alone_asks_for_no_grammar(model: TextModel) -> None:
    assert chat_prompt(model, HELLO, ToolUse([Tool("f", parameters=IMPOSSIBLE, is_strict=True)])).ids
    checker: Any = model.grammars
    assert checker.num_checked == 0


THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<s>{{ m.reasoning_content }}</s>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def thinker(model: TextModel, template: str) -> TextModel:
    return TextModel("t", model.info, model.tokenizer, ChatTemplate(template, {}), model.eos_token_ids, {})


def test_a_thoughts_budget_is_part_of_the_grammar_of_a_model_that_thinks(model: TextModel) -> None:
    thinking = thinker(model, THINKING)
    assert converse(thinking, HELLO).grammar is None
    grammar = converse(thinking, HELLO, thought_budget=ThoughtBudget(77)).grammar
    assert grammar is not None
    assert "max_tokens=77" in grammar.text
    assert converse(model, HELLO, thought_budget=ThoughtBudget(77)).grammar is None, "there is no thought to bound"


@pytest.mark.parametrize("budget", [0, -1, 1 << 21])
def test_a_budget_that_is_none_is_refused(model: TextModel, budget: int) -> None:
    with raises_code(InvalidParameterError, "budget_out_of_range"):
        converse(thinker(model, THINKING), HELLO, thought_budget=ThoughtBudget(budget))


def test_a_budget_needs_a_token_that_ends_thoughts(model: TextModel) -> None:
    spelt = THINKING.replace("<s>", "<think>").replace("</s>", "</think>")
    with raises_code(InvalidParameterError, "budget_not_supported"):
        converse(thinker(model, spelt), HELLO, thought_budget=ThoughtBudget(5))


def test_a_budget_and_a_pattern_are_not_both_held(model: TextModel) -> None:
    with raises_code(InvalidParameterError, "budget_beside_grammar"):
        converse(thinker(model, THINKING), HELLO, grammar=Grammar.regex("a+"), thought_budget=ThoughtBudget(5))


def test_descriptions_are_shown_and_are_no_part_of_a_grammar(model: TextModel) -> None:
    schema = {**FINE, "description": "what it takes", "title": "T"}
    assert b"what it takes" in json.encode(Tool("f", parameters=schema).declaration)
    assert "what it takes" not in grammar_of(model, Tool("f", parameters=schema))
