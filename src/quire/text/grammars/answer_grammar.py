"""One grammar for a whole answer: reasoning, then text or a JSON value, or tool calls. Pure.

    auto       reasoning? (text | calls)     text is unconstrained up to a call's marker; the rest is constrained
    required   reasoning? calls
    by name    reasoning? one call of that tool

Tool names and arguments are constrained, so that a call is always valid. A marker that is a special token may be
written as that token or as ordinary text. If a call is one JSON object, the object without markers is also accepted.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.grammars.grammar import JSON_STYLE
from quire.text.parsers.tool_format import CALL_ID, ID_CHARS, ObjectKeys, ReasoningFormat, TaggedArguments, ToolFormat
from quire.text.parsers.unmarked import FENCE, unmarked_pattern

FREE = r"/(.|\n)*/"
SPACE = r"SPACE: /[ \n]{0,4}/"
"""Space between parts. Bounded, because a small model may otherwise generate white space forever."""
KEY = "/[a-zA-Z0-9_.:-]{1,64}/"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """The parts of a tool that the grammar needs."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    is_strict: bool = False
    """Whether schema keywords that the library does not support are errors; otherwise they are ignored."""


@dataclass(frozen=True, slots=True)
class ToolRules:
    """The tools that may be called, and the format of calls."""

    format: ToolFormat
    tools: Sequence[CallableTool]
    must_call: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Constraints on an answer."""

    calls: ToolRules | None = None
    schema: Mapping[str, Any] | None = None
    """JSON schema of the text, if it must be JSON."""
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """Whether the prompt ends inside the reasoning."""
    max_thought_tokens: int | None = None
    """Reasoning budget. When it is used up, the grammar permits only the end marker."""


def answer_grammar(rules: AnswerRules, special: Mapping[str, int]) -> str:
    """Return the grammar in Lark. `special` has the ids of special tokens by text; literal text never matches them."""
    return "\n".join(["%llguidance {}", *_Writer(rules, special).lines(), f"TEXT: {FREE}", SPACE, ""])


def text_keys(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments that may be strings, which tagged formats write without quotes."""
    return frozenset(key for key, value_schema in _properties(schema).items() if _is_text(value_schema))


class _Writer:
    """Generates the grammar's rules for one answer, line by line."""

    def __init__(self, rules: AnswerRules, special: Mapping[str, int]) -> None:
        self._rules = rules
        self._special = special
        literals = sorted([*special, CALL_ID], key=len, reverse=True)
        # Compiled once: some models have thousands of special tokens, and a request may have hundreds of tools.
        self._literals = re.compile("(" + "|".join(map(re.escape, literals)) + ")")

    def lines(self) -> Iterator[str]:
        calls, reasoning = self._rules.calls, self._rules.reasoning
        answer = "said" if calls is None else "called" if calls.must_call else "(said | called)"
        if calls is not None:
            yield from self._call_lines(calls)
        if calls is None or not calls.must_call:
            yield f"said: {self._text_rule()}"
        if reasoning is None:
            yield f"start: {answer}"
            return
        yield from self._reasoning_lines(reasoning)
        reasoning_rest = f"thought SPACE {answer}"
        whole_reasoning = f"SPACE {self._literal(reasoning.begin)} {reasoning_rest}"
        yield f"start: {reasoning_rest}" if self._rules.is_thinking else f"start: {answer} | {whole_reasoning}"

    def _reasoning_lines(self, reasoning: ReasoningFormat) -> Iterator[str]:
        """Yield rules for reasoning up to its end marker or, at its budget, forced to end with the marker."""
        limit = self._rules.max_thought_tokens
        if limit is None:
            yield from self._lines_until("thought", reasoning.end)
            return
        end = " ".join(self._token(piece) for piece in self._pieces(reasoning.end))
        yield f"thought: bounded {end}"
        yield f"bounded[max_tokens={limit}]: THOUGHT"
        yield f"THOUGHT: {FREE} & ~/(.|\\n)*{_escaped(reasoning.end)}(.|\\n)*/"

    @property
    def _has_text_begin(self) -> bool:
        """Whether text has a start marker. Then no call can follow text."""
        return self._rules.reasoning is not None and bool(self._rules.reasoning.text_begin)

    def _text_rule(self) -> str:
        schema, calls, reasoning = self._rules.schema, self._rules.calls, self._rules.reasoning
        lead = self._literal(reasoning.text_begin) + " " if reasoning is not None and self._has_text_begin else ""
        if schema is not None:
            return lead + _json(schema)
        return lead + ("TEXT" if calls is None or calls.format.marker else "OTHER")

    def _call_lines(self, calls: ToolRules) -> Iterator[str]:
        fmt = calls.format
        is_text_allowed = not calls.must_call and self._rules.schema is None and not self._has_text_begin
        any_call = " | ".join(f"call_{index}" for index in range(len(calls.tools)))
        if not fmt.marker:
            beginning = self._literal(fmt.begin)
            yield f"OTHER: {FREE} & ~/{_escaped(fmt.begin)}(.|\\n)*/"
        elif is_text_allowed:
            beginning = "opened " + self._literal(fmt.begin.removeprefix(fmt.marker))
            yield from self._lines_until("opened", fmt.marker)
        else:
            beginning = "SPACE " + self._literal(fmt.begin)
        separator = fmt.call_separator
        repeats = f" ({self._literal(separator)} ({any_call}))*" if separator is not None and calls.is_parallel else ""
        marked_calls = f"{beginning} ({any_call}){repeats} {self._literal(fmt.end)}"
        if is_text_allowed and fmt.object_keys is not None:
            yield from self._unmarked_lines(fmt.object_keys, calls.tools)
            yield f"called: {marked_calls} | unmarked"
        else:
            yield f"called: {marked_calls}"
        for index, tool in enumerate(calls.tools):
            yield f"call_{index}: {self._call_rule(fmt, tool)}"
        if fmt.tagged is not None:
            yield from self._lines_until("text_value", fmt.tagged.after_value)

    def _unmarked_lines(self, keys: ObjectKeys, tools: Sequence[CallableTool]) -> Iterator[str]:
        """Yield rules for one call as a JSON object without markers, optionally in a code fence."""
        any_call = " | ".join(f"unmarked_{index}" for index in range(len(tools)))
        yield f'unmarked: ({any_call}) SPACE "}}" (SPACE {_quoted(FENCE)})?'
        for index, tool in enumerate(tools):
            yield f"named_{index}[lazy]: TEXT /{_slashed(unmarked_pattern(keys, tool.name))}/"
            yield f"unmarked_{index}: named_{index} SPACE {_json(tool.schema, tool.is_strict)}"

    def _call_rule(self, fmt: ToolFormat, tool: CallableTool) -> str:
        arguments = _json(tool.schema, tool.is_strict) if fmt.tagged is None else self._tag_rule(fmt.tagged, tool)
        return f"{_quoted(tool.name)} {self._literal(fmt.name_end)} {arguments} {self._literal(fmt.call_end)}"

    def _tag_rule(self, tags: TaggedArguments, tool: CallableTool) -> str:
        """Return the rule of tagged arguments in the schema's order; any arguments if the schema has no properties."""
        before, after = self._literal(tags.before_key), self._literal(tags.after_value)
        properties = _properties(tool.schema)
        if not properties:
            return f"({before} {KEY} {self._literal(tags.after_json_key)} {_json({})} {after})*"
        arguments, required = list[str](), tool.schema.get("required")
        for key, value_schema in properties.items():
            if _is_text(value_schema):
                value = f"{self._literal(tags.after_text_key)} {self._text_value(value_schema, after)}"
            else:
                value = f"{self._literal(tags.after_json_key)} {_json(value_schema, tool.is_strict)} {after}"
            argument = f"{before} {_quoted(key)} {value}"
            arguments.append(argument if isinstance(required, list) and key in required else f"({argument})?")
        return " ".join(arguments)

    def _text_value(self, schema: Mapping[str, Any], after: str) -> str:
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices):
            return f"({' | '.join(map(_quoted, choices))}) {after}"
        return "text_value"

    def _lines_until(self, name: str, marker: str) -> Iterator[str]:
        """Yield rules for any text up to the first occurrence of a marker."""
        token = self._special.get(marker)
        if token is None:
            yield f"{name}[lazy]: TEXT {_quoted(marker)}"
        else:
            yield f"{name}: {name}_spelt | TEXT <[{token}]>"
            yield f"{name}_spelt[lazy]: TEXT {_quoted(marker)}"

    def _literal(self, text: str) -> str:
        """Return a rule for exactly this text, in which special tokens may be tokens or ordinary text."""
        return " ".join(map(self._piece, self._pieces(text))) or '""'

    def _pieces(self, text: str) -> list[str]:
        """Split a text into markers and the text between them."""
        return [piece for piece in self._literals.split(text) if piece]

    def _token(self, piece: str) -> str:
        token = self._special.get(piece)
        return _quoted(piece) if token is None else f"<[{token}]>"

    def _piece(self, piece: str) -> str:
        if piece == CALL_ID:
            return f"/[a-zA-Z0-9]{{{ID_CHARS}}}/"
        token = self._special.get(piece)
        return _quoted(piece) if token is None else f"({_quoted(piece)} | <[{token}]>)"


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind, choices = schema.get("type"), schema.get("enum")
    if kind is None and isinstance(choices, list):
        return all(isinstance(choice, str) for choice in choices)
    options = [part for name in ("anyOf", "oneOf") if isinstance(parts := schema.get(name), list) for part in parts]
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or any(map(_is_text, options))


def schema_grammar(tool: CallableTool) -> str:
    """Return the grammar of a tool's arguments alone, without the format around them."""
    return f"start: {_json(tool.schema, tool.is_strict)}"


def _json(schema: Mapping[str, Any], is_strict: bool = False) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_STYLE, "lenient": not is_strict}}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return _slashed(re.escape(text)).replace("\n", "\\n")


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/")
