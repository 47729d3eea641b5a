"""Converts the structured-output options of clients to one grammar text, which the engine enforces token by token.

    a JSON schema · any JSON object · a regular expression · a grammar in Lark or GBNF · one of several texts ─► Grammar

Sizes are limited before the library compiles anything, because the time for an object is quadratic in its properties
and no limit of the library stops it. JSON has one layout, with one space after colons and commas. Models write it so,
and a small model cannot generate white space forever.
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
"""Maximum properties of one object."""
MAX_ENUM_VALUES = 10_000
MAX_DEPTH = 64
MAX_INTEGER = 2**53 - 1
"""Largest integer of exact doubles. It bounds all integers, so that the grammar never allows endless digits."""
MIN_VALUE = -(2**63) + 1024
"""Minimum in an enum or const. Smaller 64-bit integers cause infinite recursion in the library."""
VALUE_KEYWORDS = ("const", "enum", "default", "examples")
"""Schema keywords whose content is a JSON value, not a schema."""
NAME_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
"""Schema keywords whose content maps names, chosen by the client, to schemas."""
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that every answer to a request must match."""

    text: str
    """The grammar in the library's own format, for the engine."""
    parameter: str = "grammar"
    """The request parameter that defined it, for error messages."""
    schema: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The JSON schema of a JSON grammar, for use within a larger grammar; else None."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], parameter: str = "json_schema") -> "Grammar":
        """Create a grammar of the JSON values that a schema accepts. Raises InvalidParameterError, like all below."""
        value: Any = schema
        if not isinstance(value, Mapping):
            message = f"expected {parameter} to be a JSON schema, an object, got {type(value).__name__}"
            raise InvalidParameterError(message, parameter, code="schema_not_object")
        bounded = bounded_schema(schema, parameter)
        text = _from_library("json_schema", _json_text(bounded, parameter), parameter, overrides=JSON_STYLE)
        return cls(text, parameter, bounded)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Create a grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str, parameter: str = "regex") -> "Grammar":
        """Create a grammar of the texts that a regular expression matches completely."""
        return cls(_from_library("regex", _text(pattern, parameter), parameter), parameter)

    @classmethod
    def lark(cls, text: str, parameter: str = "grammar") -> "Grammar":
        """Create a grammar from Lark notation, with the start rule `start`."""
        return cls(_from_library("lark", _text(text, parameter), parameter), parameter)

    @classmethod
    def gbnf(cls, text: str, parameter: str = "grammar") -> "Grammar":
        """Create a grammar from GBNF, llama.cpp's notation, with the start rule `root`."""
        from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 - imported only for requests with a grammar

        source = _text(text, parameter)
        with _as_parameter_error(f"{parameter} is not valid GBNF", parameter, "invalid_gbnf"):
            lark = gbnf_to_lark(source)
        return cls.lark(lark, parameter)

    @classmethod
    def choice(cls, texts: Sequence[str], parameter: str = "choice") -> "Grammar":
        """Create a grammar of exactly these texts."""
        values: Any = texts
        if not isinstance(values, Sequence) or isinstance(values, str) or not 0 < len(values) <= MAX_ENUM_VALUES:
            message = f"expected {parameter} to be a list of 1 to {MAX_ENUM_VALUES} strings"
            raise InvalidParameterError(message, parameter, code="invalid_choices")
        if not all(isinstance(text, str) and text for text in values):
            raise InvalidParameterError(f"expected non-empty strings in {parameter}", parameter, code="empty_choice")
        _check_size(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts), parameter)
        # One terminal with all texts, because the library limits the alternatives of a rule.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)
        return cls(_from_library("lark", lark, parameter), parameter)


def _from_library(notation: str, text: str, parameter: str, **options: Any) -> str:
    """Convert a grammar in one of the library's notations to its own format."""
    from llguidance import LLMatcher  # noqa: PLC0415 - imported only for requests with a grammar

    with _as_parameter_error(f"{parameter} cannot be used", parameter):
        grammar: str = getattr(LLMatcher, f"grammar_from_{notation}")(text, **options)
    return grammar


@contextmanager
def _as_parameter_error(summary: str, parameter: str, code: str = "unusable_grammar") -> Iterator[None]:
    """Convert any exception of the library, which raises many types, to InvalidParameterError with its message."""
    try:
        yield
    except Exception as error:
        raise InvalidParameterError(f"{summary}: {str(error)[:300]}", parameter, code=code) from error


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
        message = f"expected {parameter} to consist of JSON values: {error}"
        raise InvalidParameterError(message, parameter, code="not_json") from None
    return text


def _check_size(num_bytes: int, parameter: str) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        message = f"expected {parameter} of at most {MAX_TEXT_BYTES} bytes, got {num_bytes}"
        hint = "leave out what the answer does not need"
        raise InvalidParameterError(f"{message}; {hint}", parameter, code="grammar_too_large")


def bounded_schema(schema: Mapping[str, Any], parameter: str) -> Any:
    """Return a copy with bounds for all integers. Raises InvalidParameterError if the schema is too large."""
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            message = f"expected {parameter} of at most {MAX_DEPTH} levels, got more"
            raise InvalidParameterError(message, parameter, code="schema_too_deep")
        if not isinstance(node, Mapping):
            continue
        properties, values = node.get("properties"), node.get("enum")
        if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
            message = f"expected at most {MAX_PROPERTIES} properties in an object of {parameter}, got {len(properties)}"
            raise InvalidParameterError(message, parameter, code="too_many_properties")
        if isinstance(values, Sequence) and len(values) > MAX_ENUM_VALUES:
            message = f"expected at most {MAX_ENUM_VALUES} values in an enum of {parameter}, got {len(values)}"
            raise InvalidParameterError(message, parameter, code="too_many_values")
        _check_values([values, node.get("const")], parameter)
    return rewritten_schema(schema, _with_bounds)


def _check_values(values: list[Any], parameter: str) -> None:
    for value, _ in _nodes(values):
        if isinstance(value, int) and -(2**63) <= value < MIN_VALUE:
            message = f"expected every value in {parameter} to be at least {MIN_VALUE}, got {value}; leave it out"
            raise InvalidParameterError(message, parameter, code="value_too_small")


def _nodes(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield all nodes of a schema with their depth. The caller may stop early, at its depth limit."""
    stack = [(schema, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        if isinstance(node, Mapping):
            stack += [(child, depth + 1) for child in node.values()]
        elif isinstance(node, list | tuple):
            stack += [(child, depth + 1) for child in node]


def rewritten_schema(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of a schema, with `change` applied to each schema in it, innermost first; values are unchanged."""
    if isinstance(node, list | tuple):
        return [rewritten_schema(item, change) for item in node]
    if not isinstance(node, Mapping):
        return node
    return change({name: _rewritten_part(name, part, change) for name, part in node.items()})


def _rewritten_part(name: str, part: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if name in VALUE_KEYWORDS:
        return part
    if name in NAME_KEYWORDS and isinstance(part, Mapping):
        return {key: rewritten_schema(subschema, change) for key, subschema in part.items()}
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
