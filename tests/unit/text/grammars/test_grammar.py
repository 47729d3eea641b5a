"""Grammars as callers give them: bounded before the library sees them, integers with an end."""

import json
from typing import Any

import pytest

from quire.errors import InvalidParameterError
from quire.text.grammars.grammar import MAX_DEPTH, MAX_INTEGER, Grammar
from tests.support.errors import raises_code


def inside(grammar: Grammar) -> Any:
    """The schema that is compiled."""
    schema = json.loads(grammar.text)["grammars"][0]["json_schema"]
    schema.pop("x-guidance")
    return schema


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_integers_without_bounds_get_those_of_a_double() -> None:
    given: dict[str, Any] = {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "exclusiveMinimum": 3}},
        "type": "object",
    }
    found = inside(Grammar.json_schema(given))["properties"]
    assert found["a"] == {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    assert found["b"] == {"type": "integer", "exclusiveMinimum": 3, "maximum": MAX_INTEGER}
    assert given["properties"]["a"] == {"type": "integer"}, "the caller's own is not touched"


@pytest.mark.parametrize("kinds", [["integer", "null"], ["integer"]])
def test_integers_among_other_types_get_them_too(kinds: list[str]) -> None:
    assert inside(Grammar.json_schema({"type": kinds}))["maximum"] == MAX_INTEGER
    assert "maximum" not in inside(Grammar.json_schema({"type": [*kinds, "number"]}))


def test_a_property_may_be_called_like_a_word_of_schemas() -> None:
    given = {"type": "object", "properties": {"default": {"type": "integer"}, "enum": {"type": "string"}}}
    assert inside(Grammar.json_schema(given))["properties"]["default"]["minimum"] == -MAX_INTEGER


def test_bounds_of_a_machines_integers_become_those_that_end() -> None:
    wide = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert inside(Grammar.json_schema(wide)) == {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    own = {"type": "integer", "minimum": -7, "maximum": 10**12}
    assert inside(Grammar.json_schema(own)) == own
    odd = {"type": "integer", "minimum": None, "exclusiveMaximum": 2**63}
    assert inside(Grammar.json_schema(odd)) == odd


def test_what_only_looks_like_a_schema_is_left_alone() -> None:
    given = {"enum": [{"type": "integer"}], "const": {"type": "integer"}, "type": "integer"}
    assert inside(Grammar.json_schema(given)) == given


@pytest.mark.parametrize(("make", "code"), [
    (lambda: Grammar.json_schema({"properties": {str(at): {} for at in range(257)}}), "too_many_properties"),
    (lambda: Grammar.json_schema({"enum": list(range(10_001))}), "too_many_values"),
    (lambda: Grammar.json_schema({"enum": [1, -(2**63)]}), "value_too_small"),
    (lambda: Grammar.json_schema({"items": {"const": {"a": [-(2**63)]}}}), "value_too_small"),
    (lambda: Grammar.json_schema(nested(MAX_DEPTH + 1)), "schema_too_deep"),
    (lambda: Grammar.json_schema({"const": "x" * 70_000}), "grammar_too_large"),
    (lambda: Grammar.json_schema({"const": float("nan")}), "not_json"),
    (lambda: Grammar.json_schema({"maximum": 10**400}), "unusable_grammar"),
    (lambda: Grammar.json_schema({"const": object()}), "not_json"),
    (lambda: Grammar.json_schema("{}"), "schema_not_object"),  # type: ignore[arg-type]
    (lambda: Grammar.regex(""), "empty_grammar"),
    (lambda: Grammar.regex("a" * 70_000), "grammar_too_large"),
    (lambda: Grammar.lark(3), "empty_grammar"),  # type: ignore[arg-type]
    (lambda: Grammar.gbnf("root = x"), "invalid_gbnf"),
    (lambda: Grammar.gbnf("root ::= nobody"), "invalid_gbnf"),
    (lambda: Grammar.choice([]), "invalid_choices"),
    (lambda: Grammar.choice("ab"), "invalid_choices"),
    (lambda: Grammar.choice(["a", ""]), "empty_choice"),
])  # fmt: skip
def test_what_is_too_much_or_no_grammar_is_refused_by_its_rule(make: Any, code: str) -> None:
    with raises_code(InvalidParameterError, code):
        make()


def test_a_schema_as_deep_as_allowed_is_taken() -> None:
    assert Grammar.json_schema(nested(MAX_DEPTH - 1)).parameter == "json_schema"
