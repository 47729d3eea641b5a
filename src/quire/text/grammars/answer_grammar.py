"""One grammar for a whole answer: reasoning, then text or a JSON value, or tool calls. Pure.

    auto       reasoning? (text | calls)     text is unconstrained until a call's marker; after that all is constrained
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
    """Schema keywords that the library does not support are errors instead of being ignored."""


@dataclass(frozen=True, slots=True)
class ToolRules:
    """The tools that may be called, and the format of calls."""

    form: ToolFormat
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
    """The prompt ends inside the reasoning."""
    max_thought_tokens: int | None = None
    """Reasoning budget. At the limit, the grammar permits only the end marker."""


def answer_grammar(rules: AnswerRules, special: Mapping[str, int]) -> str:
    """Return the grammar in Lark. `special` are special tokens: ids by text; literal text never matches them."""
    return "\n".join(["%llguidance {}", *_Writer(rules, special).lines(), f"TEXT: {FREE}", SPACE, ""])


def text_keys(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments that may be strings, which tagged formats write without quotes."""
    return frozenset(key for key, one in _properties(schema).items() if _is_text(one))


class _Writer:
    """Generates the grammar's rules for one answer, line by line."""

    def __init__(self, rules: AnswerRules, special: Mapping[str, int]) -> None:
        self._rules = rules
        self._special = special
        marks = sorted([*special, CALL_ID], key=len, reverse=True)
        # Compiled once: some models have thousands of special tokens, and a request may have hundreds of tools.
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")")

    def lines(self) -> Iterator[str]:
        calls, reasoning = self._rules.calls, self._rules.reasoning
        body = "said" if calls is None else "called" if calls.must_call else "(said | called)"
        if calls is not None:
            yield from self._called(calls)
        if calls is None or not calls.must_call:
            yield f"said: {self._text_rule()}"
        if reasoning is None:
            yield f"start: {body}"
            return
        yield from self._thought(reasoning)
        thinking = f"thought SPACE {body}"
        opened = f"SPACE {self._literal(reasoning.begin)} {thinking}"
        yield f"start: {thinking}" if self._rules.is_thinking else f"start: {body} | {opened}"

    def _thought(self, reasoning: ReasoningFormat) -> Iterator[str]:
        """Reasoning up to its end marker, or up to its budget, after which only the end marker is allowed."""
        limit = self._rules.max_thought_tokens
        if limit is None:
            yield from self._until("thought", reasoning.end)
            return
        end = " ".join(self._token(piece) for piece in self._pieces(reasoning.end))
        yield f"thought: bounded {end}"
        yield f"bounded[max_tokens={limit}]: THOUGHT"
        yield f"THOUGHT: {FREE} & ~/(.|\\n)*{_escaped(reasoning.end)}(.|\\n)*/"

    @property
    def _has_text_begin(self) -> bool:
        """Text has a start marker, so no call can follow text."""
        return self._rules.reasoning is not None and bool(self._rules.reasoning.text_begin)

    def _text_rule(self) -> str:
        schema, calls, reasoning = self._rules.schema, self._rules.calls, self._rules.reasoning
        lead = self._literal(reasoning.text_begin) + " " if reasoning is not None and self._has_text_begin else ""
        if schema is not None:
            return lead + _json(schema)
        return lead + ("TEXT" if calls is None or calls.form.marker else "OTHER")

    def _called(self, calls: ToolRules) -> Iterator[str]:
        form = calls.form
        is_free = not calls.must_call and self._rules.schema is None and not self._has_text_begin
        each = " | ".join(f"call_{index}" for index in range(len(calls.tools)))
        if not form.marker:
            opening = self._literal(form.begin)
            yield f"OTHER: {FREE} & ~/{_escaped(form.begin)}(.|\\n)*/"
        elif is_free:
            opening = "opened " + self._literal(form.begin.removeprefix(form.marker))
            yield from self._until("opened", form.marker)
        else:
            opening = "SPACE " + self._literal(form.begin)
        more = f" ({self._literal(form.again)} ({each}))*" if form.again is not None and calls.is_parallel else ""
        marked = f"{opening} ({each}){more} {self._literal(form.end)}"
        if is_free and form.object_keys is not None:
            yield from self._unmarked(form.object_keys, calls.tools)
            yield f"called: {marked} | unmarked"
        else:
            yield f"called: {marked}"
        for index, tool in enumerate(calls.tools):
            yield f"call_{index}: {self._call(form, tool)}"
        if form.tagged is not None:
            yield from self._until("text_value", form.tagged.after_value)

    def _unmarked(self, keys: ObjectKeys, tools: Sequence[CallableTool]) -> Iterator[str]:
        """One call as a JSON object without markers, optionally in a code fence."""
        each = " | ".join(f"unmarked_{index}" for index in range(len(tools)))
        yield f'unmarked: ({each}) SPACE "}}" (SPACE {_quoted(FENCE)})?'
        for index, tool in enumerate(tools):
            yield f"named_{index}[lazy]: TEXT /{_slashed(unmarked_pattern(keys, tool.name))}/"
            yield f"unmarked_{index}: named_{index} SPACE {_json(tool.schema, tool.is_strict)}"

    def _call(self, form: ToolFormat, tool: CallableTool) -> str:
        arguments = _json(tool.schema, tool.is_strict) if form.tagged is None else self._tagged(form.tagged, tool)
        return f"{_quoted(tool.name)} {self._literal(form.name_end)} {arguments} {self._literal(form.call_end)}"

    def _tagged(self, tags: TaggedArguments, tool: CallableTool) -> str:
        """Tagged arguments in the schema's order; any arguments if the schema has no properties."""
        before, after = self._literal(tags.before_key), self._literal(tags.after_value)
        properties = _properties(tool.schema)
        if not properties:
            return f"({before} {KEY} {self._literal(tags.after_json_key)} {_json({})} {after})*"
        written, required = list[str](), tool.schema.get("required")
        for key, one in properties.items():
            if _is_text(one):
                value = f"{self._literal(tags.after_text_key)} {self._text_value(one, after)}"
            else:
                value = f"{self._literal(tags.after_json_key)} {_json(one, tool.is_strict)} {after}"
            whole = f"{before} {_quoted(key)} {value}"
            written.append(whole if isinstance(required, list) and key in required else f"({whole})?")
        return " ".join(written)

    def _text_value(self, schema: Mapping[str, Any], after: str) -> str:
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(one, str) and one for one in choices):
            return f"({' | '.join(map(_quoted, choices))}) {after}"
        return "text_value"

    def _until(self, rule: str, mark: str) -> Iterator[str]:
        """Any text up to the first occurrence of a marker."""
        token = self._special.get(mark)
        if token is None:
            yield f"{rule}[lazy]: TEXT {_quoted(mark)}"
        else:
            yield f"{rule}: {rule}_spelt | TEXT <[{token}]>"
            yield f"{rule}_spelt[lazy]: TEXT {_quoted(mark)}"

    def _literal(self, text: str) -> str:
        """Exactly this text, with special tokens as tokens or as ordinary text."""
        return " ".join(map(self._piece, self._pieces(text))) or '""'

    def _pieces(self, text: str) -> list[str]:
        """Split a text into markers and the text between them."""
        return [piece for piece in self._marks.split(text) if piece]

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
        return all(isinstance(one, str) for one in choices)
    several = [part for name in ("anyOf", "oneOf") if isinstance(parts := schema.get(name), list) for part in parts]
    return kind == "string" or (isinstance(kind, list) and "string" in kind) or any(map(_is_text, several))


def schema_grammar(tool: CallableTool) -> str:
    """Return the grammar of a tool's arguments alone, without the format around them."""
    return f"start: {_json(tool.schema, tool.is_strict)}"


def _json(schema: Mapping[str, Any], is_strict: bool = False) -> str:
    style = {**JSON_STYLE, "lenient": not is_strict}
    return "%json " + json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return _slashed(re.escape(text)).replace("\n", "\\n")


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/")
