"""Reads an answer character by character: thoughts, text, calls. What comes out joined does not depend on how the
answer was cut into pieces, because nothing here knows where a piece ends. Pure.

    [thought ─end─►] text ─mark─► calls (`call_reader`)

White space between two parts belongs to neither. An answer that breaks off keeps all that has come; what began like a
mark and is none is text.
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
    """What the parts of an answer look like."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    """The prompt ended inside a thought."""
    tools: ToolFormat | None = None
    """None where no tool may be called: what looks like a call is text."""
    text_keys: TextKeys = field(default_factory=dict)
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that mark a part: they are read, where others are left out of a text."""

    @property
    def has_short_ids(self) -> bool:
        """Calls have ids in a form of the model's."""
        form = self.tools
        return form is not None and CALL_ID in form.begin + form.name_end + form.call_end

    @property
    def is_plain(self) -> bool:
        """All of an answer is text."""
        return self.reasoning is None and self.tools is None


@dataclass(frozen=True, slots=True)
class PartDelta:
    """Characters of one part. A call begins with none."""

    part: Part
    delta: str


class AnswerReader:
    """One answer. Push its text as it comes, finish once."""

    def __init__(self, form: AnswerFormat, call_id: Callable[[int], str]) -> None:
        self._reasoning = form.reasoning
        self._tools = form.tools
        self._calls: CallReader | None = None
        if form.tools is not None:
            self._calls = CallReader(form.tools, form.text_keys, call_id, self._turn, self._show)
        self._out: list[tuple[Part, list[str]]] = []
        self._part: Part = TEXT
        self._is_fresh = False
        """The part has begun behind another, and nothing of it was shown."""
        self._space: list[str] = []
        """White space at the end of a part that may not go on. A model may write nothing else: joined once."""
        self._held: list[str] = []
        """The beginning of an answer, while it may be that of a thought or a call."""
        self._seen = ""
        """The same without the white space in front."""
        self._search = StopStrings([])
        self._unmarked = None
        if form.tools is not None and form.tools.object_keys is not None:
            self._unmarked = UnmarkedSearch(form.tools.object_keys, form.text_keys.keys())
        self._state: ReadState
        if form.reasoning is None:
            self._speak()
        elif form.is_thinking:
            self._think(form.reasoning.end)
        else:
            self._state = self._before_thought

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[PartDelta]:
        """What these characters add to which parts."""
        for character in text:
            self._state(character)
        return self._taken()

    def finish(self) -> list[PartDelta]:
        """The answer is over: what was held back is no mark."""
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
        """Text or a thought: white space waits until it is known that the part goes on."""
        for character in text:
            if not character.isspace():
                self._show("".join([*self._space, character]) if self._space else character)
                self._is_fresh, self._space = False, []
            elif not self._is_fresh:
                self._space.append(character)

    def _again(self) -> None:
        """What was held back is read once more, by another state."""
        for character in self._let_go():
            self._state(character)

    def _hold(self, character: str) -> str:
        """Keep it back. Returns what is kept, from its first character that is no white space."""
        self._held.append(character)
        if self._seen or not character.isspace():
            self._seen += character
        return self._seen

    def _let_go(self) -> list[str]:
        held, self._held, self._seen = self._held, [], ""
        return held

    def _before_thought(self, character: str) -> None:
        """A thought, if the answer opens one."""
        seen = self._hold(character)
        begin = "" if self._reasoning is None else self._reasoning.begin
        if not begin.startswith(seen):
            self._speak()
            self._again()
        elif seen == begin and self._reasoning is not None:
            self._let_go()
            self._think(self._reasoning.end)

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
            self._state = self._before_text
        else:
            self._listen()

    def _before_text(self, character: str) -> None:
        """What some models write before a text is no part of it."""
        self._held.append(character)
        held = "".join(self._held)
        begin = "" if self._reasoning is None else self._reasoning.text_begin
        if held == begin:
            self._let_go()
            self._listen()
        elif not begin.startswith(held):
            self._listen()
            self._again()

    def _listen(self) -> None:
        if self._tools is None:
            self._state = self._emit
        elif self._tools.marker:
            self._search = StopStrings([self._tools.marker])
            self._state = self._in_text
        else:
            self._state = self._before_call

    def _in_text(self, character: str) -> None:
        delta = self._search.push(character)
        for one in delta.text:
            self._emit_unless_call(one)
        if delta.stop is not None and self._tools is not None:
            self._emit(self._no_call())
            self._call(self._tools.begin.removeprefix(delta.stop))

    def _emit_unless_call(self, character: str) -> None:
        """Text, as far as it does not become a call without a mark. No mark begins inside of what begins one."""
        if self._unmarked is None:
            self._emit(character)
            return
        searched = self._unmarked.push(character)
        self._emit(searched.text)
        if searched.name is not None and self._calls is not None:
            self._calls.start_unmarked(searched.name)
            self._state = self._calls.feed

    def _no_call(self) -> str:
        """What was held back because a call might have begun."""
        return "" if self._unmarked is None else self._unmarked.flush()

    def _before_call(self, character: str) -> None:
        """Without a mark, an answer is a call if it begins like one."""
        seen = self._hold(character)
        begin = "" if self._tools is None else self._tools.begin
        if not begin.startswith(seen):
            self._state = self._emit
            self._again()
        elif seen == begin:
            self._let_go()
            self._call("")

    def _call(self, rest: str) -> None:
        self._search = StopStrings([])
        if self._calls is not None:
            self._calls.start(rest)
            self._state = self._calls.feed
