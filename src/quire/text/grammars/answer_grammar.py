"""One grammar for a whole answer: the thought, then text or a JSON value, or calls of tools. Pure.

    auto       thought? (text | calls)       text is free until the mark of a call; from there on all is laid down
    required   thought? calls
    by name    thought? one call of that tool

Names and arguments are always those of a tool, because a model cannot write others. A mark that is a token of its own
may be written as that token or letter by letter; where a call is one object, that object alone is one, too.
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
"""Between parts: a small model must not go on with blanks for ever."""
KEY = "/[a-zA-Z0-9_.:-]{1,64}/"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as the grammar sees it."""

    name: str
    schema: Mapping[str, Any]
    """Of its arguments: an object."""
    is_strict: bool = False
    """What the library does not know of the schema is an error, and not passed over."""


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Which tools may be called, and how."""

    form: ToolFormat
    tools: Sequence[CallableTool]
    must_call: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What an answer may be."""

    calls: ToolRules | None = None
    schema: Mapping[str, Any] | None = None
    """Of the text, where it must be JSON."""
    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt ended inside a thought."""
    max_thought_tokens: int | None = None
    """A thought that is longer is ended: its end is written for the model."""


def answer_grammar(rules: AnswerRules, special: Mapping[str, int]) -> str:
    """In Lark. `special` are tokens that stand for more than their text: no text in a grammar matches them."""
    return "\n".join(["%llguidance {}", *_Writer(rules, special).lines(), f"TEXT: {FREE}", SPACE, ""])


def text_keys(schema: Mapping[str, Any]) -> frozenset[str]:
    """Arguments that may be texts: between tags they are written without quotes."""
    return frozenset(key for key, one in _properties(schema).items() if _is_text(one))


class _Writer:
    """Rules of one answer, line by line."""

    def __init__(self, rules: AnswerRules, special: Mapping[str, int]) -> None:
        self._rules = rules
        self._special = special
        marks = sorted([*special, CALL_ID], key=len, reverse=True)
        # Made once: some models have thousands of marks, and a request hundreds of tools.
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
        """To its end, or to the end of its budget: then the tokens of its mark are all that is left to write."""
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
        """A text has a mark of its own: no call stands behind one."""
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
        """One call as an object without marks, perhaps between fences."""
        each = " | ".join(f"unmarked_{index}" for index in range(len(tools)))
        yield f'unmarked: ({each}) SPACE "}}" (SPACE {_quoted(FENCE)})?'
        for index, tool in enumerate(tools):
            yield f"named_{index}[lazy]: TEXT /{_slashed(unmarked_pattern(keys, tool.name))}/"
            yield f"unmarked_{index}: named_{index} SPACE {_json(tool.schema, tool.is_strict)}"

    def _call(self, form: ToolFormat, tool: CallableTool) -> str:
        arguments = _json(tool.schema, tool.is_strict) if form.tagged is None else self._tagged(form.tagged, tool)
        return f"{_quoted(tool.name)} {self._literal(form.name_end)} {arguments} {self._literal(form.call_end)}"

    def _tagged(self, tags: TaggedArguments, tool: CallableTool) -> str:
        """Each argument in the schema's order; of a tool that declares none, any."""
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
        """Any text that ends with a mark, as soon as it does."""
        token = self._special.get(mark)
        if token is None:
            yield f"{rule}[lazy]: TEXT {_quoted(mark)}"
        else:
            yield f"{rule}: {rule}_spelt | TEXT <[{token}]>"
            yield f"{rule}_spelt[lazy]: TEXT {_quoted(mark)}"

    def _literal(self, text: str) -> str:
        """Exactly this text, with its tokens written either way."""
        return " ".join(map(self._piece, self._pieces(text))) or '""'

    def _pieces(self, text: str) -> list[str]:
        """Marks, and what stands between them."""
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
    """Of a tool's arguments alone, whatever stands around them."""
    return f"start: {_json(tool.schema, tool.is_strict)}"


def _json(schema: Mapping[str, Any], is_strict: bool = False) -> str:
    style = {**JSON_STYLE, "lenient": not is_strict}
    return "%json " + json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """For a regular expression between slashes."""
    return _slashed(re.escape(text)).replace("\n", "\\n")


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/")
