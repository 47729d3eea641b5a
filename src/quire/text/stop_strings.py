"""Where a text must end because a client said so. Pure: strings in, strings out; imports errors alone.

The rule: the stop string that is complete first ends the text, just before its own first character; of those complete
with the same character, the longest. So the answer depends on the text alone, never on how it was cut into pieces,
and a stop is known the moment its last character arrives: no token is generated just to find out.

    stops "abcd", "bc"     text "xabcd"  ->  "xa", stopped by "bc"       it is complete before "abcd" is
    stops "abc", "bc"      text "xabc"   ->  "x", stopped by "abc"       both at once: the longer
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidTextError


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that may be sent."""

    text: str
    stop: str | None = None
    """The stop string that was completed. Nothing follows."""


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces, and holds back only what may yet become one.

    A character costs a few steps for each stop string, and a piece a copy of what is held back, however long the text.
    """

    __slots__ = ("_held", "_is_over", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidTextError("expected a stop string of at least one character, got an empty one; leave it out")
        # The longest first, so that of several complete at once it is found first.
        self._stops = [_Search(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> Delta:
        """What may be sent now. With a stop: what came before it, and all later calls give nothing."""
        if self._is_over:
            return Delta("")
        if not self._stops:
            return Delta(text)
        window = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # No `any` here: every search must see every character.
            found = [search for search in self._stops if search.feed(character)]
            if found:
                stop = found[0].stop
                self._is_over = True
                self._held = ""
                return Delta(window[: end - len(stop)], stop)
        num_held = max(search.num_matched for search in self._stops)
        border = len(window) - num_held
        self._held = window[border:]
        return Delta(window[:border])

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        self._is_over = True
        return held


class _Search:
    """Knuth, Morris and Pratt: how much of the stop string the text so far ends with."""

    __slots__ = ("_retreat", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._retreat = [0]
        """By number of characters matched, less one: how many remain matched if the next one differs."""
        for character in stop[1:]:
            self._retreat.append(self._step(self._retreat[-1], character))

    def feed(self, character: str) -> bool:
        """Whether this character completes the stop string. Not to be asked again after it did."""
        self.num_matched = self._step(self.num_matched, character)
        return self.num_matched == len(self.stop)

    def _step(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._retreat[num_matched - 1]
        return num_matched + (self.stop[num_matched] == character)
