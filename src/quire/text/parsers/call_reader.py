"""Parses tool calls character by character, from the end of the first call's marker to the end of the last call. Pure.

    literal ─► name ─► literal ─┬─► JSON object ───────────────────────────┬─► literal ─┬─► name …   another call
                                └─► (literal key literal value literal)* ──┘            └─► end      after the last

Arguments are streamed as the model writes them. Tagged arguments are converted to JSON on the way: strings get quotes,
all other values are already JSON.
"""

import json
from collections.abc import Callable, Mapping

from quire.text.parsers.parts import ToolCallPart
from quire.text.parsers.tool_format import (
    CALL_ID,
    ID_CHARS,
    JSON_ONLY,
    TaggedArguments,
    TextKeys,
    ToolFormat,
    common_start,
)
from quire.text.stop_strings import StopStrings

NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:/-")
ReadState = Callable[[str], None]
Begin = Callable[[ToolCallPart], None]
"""Callback: a new call has started."""
Show = Callable[[str], None]
"""Callback: these characters are appended to the current call's arguments."""


class JsonScanner:
    """Tracks nesting and strings in a JSON value that arrives character by character."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    @property
    def is_between(self) -> bool:
        """Whether the position is outside all strings, objects and lists."""
        return not self._depth and not self._is_in_string

    def feed(self, character: str) -> None:
        """Process the next character of the value."""
        if not self._is_in_string:
            self._is_in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
        elif self._is_escaped:
            self._is_escaped = False
        else:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'


class CallReader:
    """Parser for all tool calls of one answer."""

    def __init__(
        self, tool_format: ToolFormat, text_keys: TextKeys, call_id: Callable[[int], str], begin: Begin, show: Show
    ) -> None:
        self._format = tool_format
        self._tagged: TaggedArguments = tool_format.tagged or JSON_ONLY
        self._text_keys: Mapping[str, frozenset[str]] = text_keys
        self._call_id = call_id
        self._begin = begin
        self._show = show
        self.num_calls = 0
        self._matched = ""
        """Characters that may be the start of another call or argument."""
        self._literal = ""
        """The rest of the literal that comes next."""
        self._next_state: ReadState = self._skip
        self._name = self._id = ""
        self._characters: list[str] = []
        """Characters of an incomplete name or key; a list, because a model may write any number of them."""
        self._is_unmarked = False
        self._num_arguments = 0
        self._scanner = JsonScanner()
        self._search = StopStrings([])
        self._key_end = common_start(self._tagged.after_text_key, self._tagged.after_json_key)
        """The common start of both literals after a key; the characters after it show how the value is written."""
        self._state: ReadState = self._skip

    def start(self, rest: str) -> None:
        """Start a call; `rest` is the rest of the literal before its name."""
        self._expect(rest, self._in_name)

    def start_unmarked(self, name: str) -> None:
        """Start a call of this tool, written as a JSON object without markers: only its arguments follow."""
        self._name, self._is_unmarked = name, True
        self._state = self._before_object

    def feed(self, character: str) -> None:
        """Process the next character of the answer."""
        self._state(character)

    def _expect(self, literal: str, next_state: ReadState) -> None:
        """Expect these characters, and continue in state `next_state` after them."""
        self._literal, self._next_state = literal, next_state
        self._state = self._in_literal if literal else next_state

    def _in_literal(self, character: str) -> None:
        if self._literal[0] == CALL_ID:
            self._id += character
            if len(self._id) < ID_CHARS:
                return
        self._literal = self._literal[1:]
        if not self._literal:
            self._state = self._next_state

    def _in_name(self, character: str) -> None:
        if character in NAME_CHARS:
            self._characters.append(character)
            return
        self._name, self._characters = "".join(self._characters), []
        self._expect(self._format.name_end, self._arguments)
        self._state(character)

    def _before_object(self, character: str) -> None:
        if not character.isspace():
            self._arguments(character)

    def _arguments(self, character: str) -> None:
        """The first character of a call's arguments."""
        has_id = CALL_ID in self._format.begin + self._format.name_end
        call_id = self._id if has_id else self._call_id(self.num_calls)
        self._begin(ToolCallPart(self.num_calls, call_id, self._name))
        self.num_calls += 1
        self._id = ""
        self._num_arguments = 0
        self._scanner = JsonScanner()
        if self._format.tagged is None:
            self._state = self._in_object
        else:
            self._show("{")
            self._state = self._before_key
        self._state(character)

    def _in_object(self, character: str) -> None:
        self._scanner.feed(character)
        self._show(character)
        if self._scanner.is_between and self._is_unmarked:
            self._state = self._skip
        elif self._scanner.is_between:
            self._expect(self._format.call_end, self._after_call)

    def _before_key(self, character: str) -> None:
        """Another argument, or the end of the call."""
        self._matched += character
        if not self._tagged.before_key.startswith(self._matched):
            text, self._matched = self._matched, ""
            self._show("}")
            self._expect(self._format.call_end, self._after_call)
            for matched in text:
                self._state(matched)
        elif self._matched == self._tagged.before_key:
            self._matched = ""
            self._search = StopStrings([self._key_end])
            self._state = self._in_key

    def _in_key(self, character: str) -> None:
        delta = self._search.push(character)
        self._characters.append(delta.text)
        if delta.stop is None:
            return
        key, self._characters = "".join(self._characters), []
        self._show((", " if self._num_arguments else "") + json.dumps(key) + ": ")
        self._num_arguments += 1
        self._search = StopStrings([self._tagged.after_value])
        if key in self._text_keys.get(self._name, ()):
            self._show('"')
            self._expect(self._tagged.after_text_key.removeprefix(delta.stop), self._in_text)
        else:
            self._expect(self._tagged.after_json_key.removeprefix(delta.stop), self._in_json)

    def _in_text(self, character: str) -> None:
        delta = self._search.push(character)
        self._show(json.dumps(delta.text, ensure_ascii=False)[1:-1])
        if delta.stop is not None:
            self._show('"')
            self._state = self._before_key

    def _in_json(self, character: str) -> None:
        """A JSON value. Its end tag may also occur in strings within the value, where it is ignored."""
        if not self._scanner.is_between:
            self._scanner.feed(character)
            self._show(character)
            return
        delta = self._search.push(character)
        for value_character in delta.text:
            self._scanner.feed(value_character)
        self._show(delta.text)
        if delta.stop is not None:
            self._state = self._before_key

    def _after_call(self, character: str) -> None:
        """Another call, or the end of all calls."""
        self._matched += character
        separator = self._format.call_separator
        if separator is None or not separator.startswith(self._matched):
            self._state = self._skip
        elif self._matched == separator:
            self._matched = ""
            self._state = self._in_name

    def _skip(self, character: str) -> None:
        """Discard text after the last call."""
