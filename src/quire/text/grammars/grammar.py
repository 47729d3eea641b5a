"""What an answer may be: the ways in which clients say it, made into one text, which an engine follows token by token.

    a JSON schema · any JSON object · a regular expression · a grammar in Lark or GBNF · one of several texts ─► Grammar

What is compiled is bounded before the library sees it: compiling an object of many properties takes time with the
square of their number, and no limit of the library's stops it. JSON is written in one way, with a blank behind colons
and commas: that is what models write, and a small model cannot go on with blanks for ever.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidParameterError

MAX_TEXT_BYTES = 64 * 1024
MAX_PROPERTIES = 256
"""Of one object."""
MAX_ENUM_VALUES = 10_000
MAX_DEPTH = 64
MAX_INTEGER = 2**53 - 1
"""What a double holds exactly. An integer without bounds, or with wider ones, gets these: its digits must end."""
LEAST_VALUE = -(2**63) + 1024
"""In an enum or a const: an integer that is less and still has 64 bits makes the library call itself without end."""
OF_ANSWERS = ("const", "enum", "default", "examples")
"""What stands in these is an answer's, not a schema's."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""In these, schemas have names that a client chose."""
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What every answer to a request must match."""

    text: str
    """As the engine takes it."""
    parameter: str = "grammar"
    """The name of the parameter that it came in."""
    schema: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """Of the JSON that it is, where it is JSON: so it can be a part of another."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], parameter: str = "json_schema") -> "Grammar":
        """JSON that this schema accepts."""
        from llguidance import LLMatcher  # noqa: PLC0415 - paid by who has a grammar

        value: Any = schema
        if not isinstance(value, Mapping):
            rule = f"expected {parameter} to be a JSON schema, an object, got {type(value).__name__}"
            raise InvalidParameterError(rule, parameter, code="schema_not_object")
        bounded = bounded_schema(schema, parameter)
        text = _json_text(bounded, parameter)
        with _as_parameter_error(f"{parameter} cannot be used", parameter):
            return cls(LLMatcher.grammar_from_json_schema(text, overrides=JSON_STYLE), parameter, bounded)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str, parameter: str = "regex") -> "Grammar":
        """A text that this expression matches, all of it."""
        from llguidance import LLMatcher  # noqa: PLC0415 - paid by who has a grammar

        checked = _text(pattern, parameter)
        with _as_parameter_error(f"{parameter} cannot be used", parameter):
            return cls(LLMatcher.grammar_from_regex(checked), parameter)

    @classmethod
    def lark(cls, text: str, parameter: str = "grammar") -> "Grammar":
        """What the rule `start` of a grammar in Lark derives."""
        return cls(_lark(_text(text, parameter), parameter), parameter)

    @classmethod
    def gbnf(cls, text: str, parameter: str = "grammar") -> "Grammar":
        """What the rule `root` of a grammar in GBNF, llama.cpp's notation, derives."""
        from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 - the same

        checked = _text(text, parameter)
        with _as_parameter_error(f"{parameter} is not valid GBNF", parameter, "invalid_gbnf"):
            lark = gbnf_to_lark(checked)
        return cls.lark(lark, parameter)

    @classmethod
    def choice(cls, texts: Sequence[str], parameter: str = "choice") -> "Grammar":
        """One of these texts."""
        values: Any = texts
        if not isinstance(values, Sequence) or isinstance(values, str) or not 0 < len(values) <= MAX_ENUM_VALUES:
            rule = f"expected {parameter} to be a list of 1 to {MAX_ENUM_VALUES} strings"
            raise InvalidParameterError(rule, parameter, code="invalid_choices")
        if not all(isinstance(one, str) and one for one in values):
            raise InvalidParameterError(f"expected non-empty strings in {parameter}", parameter, code="empty_choice")
        _check_size(sum(len(one.encode("utf-8", "surrogatepass")) for one in texts), parameter)
        # One terminal, and not an alternative of the rule for each: the library bounds those of one place.
        return cls(
            _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in texts), parameter), parameter
        )


def _lark(text: str, parameter: str) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 - paid by who has a grammar

    with _as_parameter_error(f"{parameter} cannot be used", parameter):
        made: str = LLMatcher.grammar_from_lark(text)
    return made


@contextmanager
def _as_parameter_error(what: str, parameter: str, code: str = "unusable_grammar") -> Iterator[None]:
    """The library raises many kinds of exceptions, plain ones too: the client gets their message."""
    try:
        yield
    except Exception as error:
        raise InvalidParameterError(f"{what}: {str(error)[:300]}", parameter, code=code) from error


def _text(value: object, parameter: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"expected {parameter} to be a non-empty string", parameter, code="empty_grammar")
    _check_size(len(value.encode("utf-8", "surrogatepass")), parameter)
    return value


def _json_text(schema: object, parameter: str) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_size(len(text.encode()), parameter)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        sentence = f"expected {parameter} to consist of JSON values: {error}"
        raise InvalidParameterError(sentence, parameter, code="not_json") from None
    return text


def _check_size(num_bytes: int, parameter: str) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        rule = f"expected {parameter} of at most {MAX_TEXT_BYTES} bytes, got {num_bytes}"
        way_out = "leave out what the answer does not need"
        raise InvalidParameterError(f"{rule}; {way_out}", parameter, code="grammar_too_large")


def bounded_schema(schema: Mapping[str, Any], parameter: str) -> Any:
    """A copy in which integers have bounds. Raises InvalidParameterError if it is too large to be compiled."""
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            rule = f"expected {parameter} of at most {MAX_DEPTH} levels, got more"
            raise InvalidParameterError(rule, parameter, code="schema_too_deep")
        if not isinstance(node, Mapping):
            continue
        properties, values = node.get("properties"), node.get("enum")
        if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
            rule = f"expected at most {MAX_PROPERTIES} properties in an object of {parameter}, got {len(properties)}"
            raise InvalidParameterError(rule, parameter, code="too_many_properties")
        if isinstance(values, Sequence) and len(values) > MAX_ENUM_VALUES:
            rule = f"expected at most {MAX_ENUM_VALUES} values in an enum of {parameter}, got {len(values)}"
            raise InvalidParameterError(rule, parameter, code="too_many_values")
        _check_values([values, node.get("const")], parameter)
    return rewritten_schema(schema, _with_bounds)


def _check_values(values: list[Any], parameter: str) -> None:
    for value, _ in _nodes(values):
        if isinstance(value, int) and -(2**63) <= value < LEAST_VALUE:
            rule = f"expected every value in {parameter} to be at least {LEAST_VALUE}, got {value}; leave it out"
            raise InvalidParameterError(rule, parameter, code="value_too_small")


def _nodes(schema: Any) -> Iterator[tuple[Any, int]]:
    """Everything in a schema, and how deep it lies; no deeper than one level beyond what is allowed."""
    left = [(schema, 0)]
    while left:
        node, depth = left.pop()
        yield node, depth
        if isinstance(node, Mapping):
            left += [(one, depth + 1) for one in node.values()]
        elif isinstance(node, list | tuple):
            left += [(one, depth + 1) for one in node]


def rewritten_schema(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy with a change made to every schema in it, the innermost first. Values of answers stay as they are."""
    if isinstance(node, list | tuple):
        return [rewritten_schema(one, change) for one in node]
    if not isinstance(node, Mapping):
        return node
    return change({name: _rewritten_part(name, part, change) for name, part in node.items()})


def _rewritten_part(name: str, part: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if name in OF_ANSWERS:
        return part
    if name in BY_NAME and isinstance(part, Mapping):
        return {key: rewritten_schema(one, change) for key, one in part.items()}
    return rewritten_schema(part, change)


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds and "enum" not in schema and "const" not in schema:
        if "exclusiveMinimum" not in schema and _is_between(schema.get("minimum", -math.inf), -math.inf, -MAX_INTEGER):
            schema["minimum"] = -MAX_INTEGER
        if "exclusiveMaximum" not in schema and _is_between(schema.get("maximum", math.inf), MAX_INTEGER, math.inf):
            schema["maximum"] = MAX_INTEGER
    return schema


def _is_between(bound: object, low: float, high: float) -> bool:
    return isinstance(bound, int | float) and low <= bound <= high
