"""Parses an answer character by character into reasoning, text and tool calls. Pure. The joined output does not depend
on how the answer was split into pieces, because characters are processed one by one.

    [reasoning ─end─►] text ─marker─► calls (`call_reader`)

White space between two parts is dropped. All text of an answer that ends early is kept; an incomplete marker is text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.text.parsers.call_reader import CallReader, ReadState
from quire.text.parsers.parts import REASONING, TEXT, Part
from quire.text.parsers.tool_format import CALL_ID, ReasoningFormat, TextKeys, ToolFormat
from quire.text.parsers.unmarked import UnmarkedSearch
from quire.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats of the parts of an answer."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt ends inside the reasoning."""
    tools: ToolFormat | None = None
    """None if no tool may be called: text that looks like a call stays text."""
    text_keys: TextKeys = field(default_factory=dict)
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens in the markers of parts. They are detokenized for this parser, other special tokens are not."""

    @property
    def has_short_ids(self) -> bool:
        """Whether the model's format requires short call ids."""
        form = self.tools
        return form is not None and CALL_ID in form.begin + form.name_end + form.call_end

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

    def __init__(self, form: AnswerFormat, call_id: Callable[[int], str]) -> None:
        self._reasoning = form.reasoning
        self._tools = form.tools
        self._calls: CallReader | None = None
        if form.tools is not None:
            self._calls = CallReader(form.tools, form.text_keys, call_id, self._turn, self._show)
        self._out: list[tuple[Part, list[str]]] = []
        self._part: Part = TEXT
        self._is_fresh = False
        """A new part has started and has no output yet, so its leading white space is dropped."""
        self._space: list[str] = []
        """White space that is dropped if the part ends here. A list, because a model may write any amount of it."""
        self._held: list[str] = []
        """The start of an answer, while it may be the start of reasoning or a call."""
        self._seen = ""
        """`_held` without skipped leading white space."""
        self._search = StopStrings([])
        self._unmarked = None
        if form.tools is not None and form.tools.object_keys is not None:
            self._unmarked = UnmarkedSearch(form.tools.object_keys, form.text_keys.keys())
        self._state: ReadState
        reasoning = form.reasoning
        if reasoning is None:
            self._speak()
        elif form.is_thinking:
            self._think(reasoning.end)
        else:
            self._await(reasoning.begin, lambda: self._think(reasoning.end), self._speak)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[PartDelta]:
        """Process these characters and return the new deltas."""
        for character in text:
            self._state(character)
        return self._taken()

    def finish(self) -> list[PartDelta]:
        """Return the deltas of all held text, at the end of the answer."""
        self._emit("".join(self._held) + self._no_call() + self._search.flush())
        if self._space and self._part is TEXT:
            self._show("".join(self._space))
        return self._taken()

    def _taken(self) -> list[PartDelta]:
        taken = [PartDelta(part, "".join(characters)) for part, characters in self._out]
        self._out = []
        return taken

    def _turn(self, part: Part) -> None:
        self._part, self._is_fresh, self._space = part, True, []
        if part is not TEXT and part is not REASONING:
            self._out.append((part, []))

    def _show(self, text: str) -> None:
        if self._out and self._out[-1][0] == self._part:
            self._out[-1][1].append(text)
        else:
            self._out.append((self._part, [text]))

    def _emit(self, text: str) -> None:
        """Emit text or reasoning. White space is held until the part continues."""
        for character in text:
            if not character.isspace():
                self._show("".join([*self._space, character]) if self._space else character)
                self._is_fresh, self._space = False, []
            elif not self._is_fresh:
                self._space.append(character)

    def _await(
        self, literal: str, then: Callable[[], None], otherwise: Callable[[], None], *, is_space_skipped: bool = True
    ) -> None:
        """Hold text back while it may become this literal. If it does not, another state processes it again."""

        def hold(character: str) -> None:
            self._held.append(character)
            if self._seen or not (is_space_skipped and character.isspace()):
                self._seen += character
            if self._seen == literal:
                self._let_go()
                then()
            elif not literal.startswith(self._seen):
                otherwise()
                for one in self._let_go():
                    self._state(one)

        self._state = hold

    def _let_go(self) -> list[str]:
        held, self._held, self._seen = self._held, [], ""
        return held

    def _think(self, end: str) -> None:
        self._turn(REASONING)
        self._search = StopStrings([end])
        self._state = self._in_thought

    def _in_thought(self, character: str) -> None:
        delta = self._search.push(character)
        self._emit(delta.text)
        if delta.stop is not None:
            self._turn(TEXT)
            self._speak()

    def _speak(self) -> None:
        self._search = StopStrings([])
        if self._reasoning is not None and self._reasoning.text_begin:
            # Some models write a marker before the text; it is not part of the text.
            self._await(self._reasoning.text_begin, self._listen, self._listen, is_space_skipped=False)
        else:
            self._listen()

    def _listen(self) -> None:
        if self._tools is None:
            self._show_all()
        elif self._tools.marker:
            self._search = StopStrings([self._tools.marker])
            self._state = self._in_text
        else:
            # Without a mark, an answer is a call if it begins like one.
            self._await(self._tools.begin, lambda: self._call(""), self._show_all)

    def _show_all(self) -> None:
        self._state = self._emit

    def _in_text(self, character: str) -> None:
        delta = self._search.push(character)
        for one in delta.text:
            self._emit_unless_call(one)
        if delta.stop is not None and self._tools is not None:
            self._emit(self._no_call())
            self._call(self._tools.begin.removeprefix(delta.stop))

    def _emit_unless_call(self, character: str) -> None:
        """Emit text that cannot be the start of a call without markers. Such a start never includes a marker."""
        if self._unmarked is None:
            self._emit(character)
            return
        text, name = self._unmarked.push(character)
        self._emit(text)
        if name is not None and self._calls is not None:
            self._calls.start_unmarked(name)
            self._state = self._calls.feed

    def _no_call(self) -> str:
        """Text that was held back as the possible start of a call."""
        return "" if self._unmarked is None else self._unmarked.flush()

    def _call(self, rest: str) -> None:
        self._search = StopStrings([])
        if self._calls is not None:
            self._calls.start(rest)
            self._state = self._calls.feed
