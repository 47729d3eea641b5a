"""Parses an answer into reasoning, text and tool calls. Pure. Characters are processed one by one, so the joined output
does not depend on how the answer was split into pieces.

    [reasoning ─end─►] text ─marker─► calls (`call_reader`)

White space between two parts is dropped. If an answer ends early, nothing is lost: an incomplete marker is text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.text.parsers.call_reader import CallReader, ReadState
from quire.text.parsers.parts import REASONING, TEXT, Part
from quire.text.parsers.tool_format import CALL_ID, ReasoningFormat, TextKeys, ToolFormat
from quire.text.parsers.unmarked import UnmarkedSearch
from quire.text.stop_strings import StopStrings

Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats of the parts of an answer."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt ends inside the reasoning."""
    tools: ToolFormat | None = None
    """None if no tool may be called; then text that looks like a call stays text."""
    text_keys: TextKeys = field(default_factory=dict)
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens in the markers of parts. They are detokenized, because this parser needs their text."""

    @property
    def has_short_ids(self) -> bool:
        """Whether the model's format requires short call ids."""
        tool_format = self.tools
        return tool_format is not None and CALL_ID in tool_format.begin + tool_format.name_end + tool_format.call_end

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None and self.tools is None


@dataclass(frozen=True, slots=True)
class PartDelta:
    """Characters of one part. The first delta of a call is empty."""

    part: Part
    delta: str


class AnswerReader:
    """Parser of one answer. Push its text as it arrives, and call `finish` once."""

    def __init__(self, answer_format: AnswerFormat, call_id: Callable[[int], str]) -> None:
        self._reasoning = answer_format.reasoning
        self._tools = answer_format.tools
        self._calls: CallReader | None = None
        if self._tools is not None:
            self._calls = CallReader(self._tools, answer_format.text_keys, call_id, self._start_part, self._append)
        self._out: list[tuple[Part, list[str]]] = []
        self._part: Part = TEXT
        self._is_part_empty = False
        """A new part has started and has no output yet, so its leading white space is dropped."""
        self._space: list[str] = []
        """White space that is dropped if the part ends here. A list, because a model may write any amount of it."""
        self._pending: list[str] = []
        """The start of an answer, while it may be the start of reasoning or a call."""
        self._matched = ""
        """`_pending` without leading white space that is skipped."""
        self._search = StopStrings([])
        self._unmarked = None
        if answer_format.tools is not None and answer_format.tools.object_keys is not None:
            self._unmarked = UnmarkedSearch(answer_format.tools.object_keys, answer_format.text_keys.keys())
        self._state: ReadState
        reasoning = answer_format.reasoning
        if reasoning is None:
            self._start_text()
        elif answer_format.is_thinking:
            self._start_reasoning(reasoning.end)
        else:
            self._match(reasoning.begin, lambda: self._start_reasoning(reasoning.end), self._start_text)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[PartDelta]:
        """Process these characters and return the new deltas."""
        for character in text:
            self._state(character)
        return self._take_deltas()

    def finish(self) -> list[PartDelta]:
        """Return the deltas of all pending text, at the end of the answer."""
        self._emit("".join(self._pending) + self._flush_unmarked() + self._search.flush())
        if self._space and self._part is TEXT:
            self._append("".join(self._space))
        return self._take_deltas()

    def _take_deltas(self) -> list[PartDelta]:
        deltas = [PartDelta(part, "".join(characters)) for part, characters in self._out]
        self._out = []
        return deltas

    def _start_part(self, part: Part) -> None:
        self._part, self._is_part_empty, self._space = part, True, []
        if part is not TEXT and part is not REASONING:
            self._out.append((part, []))

    def _append(self, text: str) -> None:
        if self._out and self._out[-1][0] == self._part:
            self._out[-1][1].append(text)
        else:
            self._out.append((self._part, [text]))

    def _emit(self, text: str) -> None:
        """Emit text or reasoning. White space is held back until the part continues."""
        for character in text:
            if not character.isspace():
                self._append("".join([*self._space, character]) if self._space else character)
                self._is_part_empty, self._space = False, []
            elif not self._is_part_empty:
                self._space.append(character)

    def _match(self, literal: str, on_match: Action, on_mismatch: Action, *, is_space_skipped: bool = True) -> None:
        """Hold text back while it may become this literal. `on_mismatch` sets the state that reads other text."""

        def hold(character: str) -> None:
            self._pending.append(character)
            if self._matched or not (is_space_skipped and character.isspace()):
                self._matched += character
            if self._matched == literal:
                self._release_pending()
                on_match()
            elif not literal.startswith(self._matched):
                on_mismatch()
                for pending in self._release_pending():
                    self._state(pending)

        self._state = hold

    def _release_pending(self) -> list[str]:
        pending, self._pending, self._matched = self._pending, [], ""
        return pending

    def _start_reasoning(self, end: str) -> None:
        self._start_part(REASONING)
        self._search = StopStrings([end])
        self._state = self._in_reasoning

    def _in_reasoning(self, character: str) -> None:
        delta = self._search.push(character)
        self._emit(delta.text)
        if delta.stop is not None:
            self._start_part(TEXT)
            self._start_text()

    def _start_text(self) -> None:
        self._search = StopStrings([])
        if self._reasoning is not None and self._reasoning.text_begin:
            # Some models write a marker before the text; it is not part of the text.
            self._match(self._reasoning.text_begin, self._read_text, self._read_text, is_space_skipped=False)
        else:
            self._read_text()

    def _read_text(self) -> None:
        if self._tools is None:
            self._read_plain_text()
        elif self._tools.marker:
            self._search = StopStrings([self._tools.marker])
            self._state = self._in_text
        else:
            # Without a marker, an answer is a call only if it begins like a call.
            self._match(self._tools.begin, lambda: self._start_calls(""), self._read_plain_text)

    def _read_plain_text(self) -> None:
        self._state = self._emit

    def _in_text(self, character: str) -> None:
        delta = self._search.push(character)
        for text_character in delta.text:
            self._emit_unless_call(text_character)
        if delta.stop is not None and self._tools is not None:
            self._emit(self._flush_unmarked())
            self._start_calls(self._tools.begin.removeprefix(delta.stop))

    def _emit_unless_call(self, character: str) -> None:
        """Emit text unless it may be the start of a call without markers. Such a start never includes a marker."""
        if self._unmarked is None:
            self._emit(character)
            return
        text, name = self._unmarked.push(character)
        self._emit(text)
        if name is not None and self._calls is not None:
            self._calls.start_unmarked(name)
            self._state = self._calls.feed

    def _flush_unmarked(self) -> str:
        """Return the text that was held back as the possible start of a call."""
        return "" if self._unmarked is None else self._unmarked.flush()

    def _start_calls(self, rest: str) -> None:
        self._search = StopStrings([])
        if self._calls is not None:
            self._calls.start(rest)
            self._state = self._calls.feed
