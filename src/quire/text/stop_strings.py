"""Stop strings of a request. Pure functions of strings; imports errors only.

The first stop string to be completed ends the text, just before the stop string's first character. If one character
completes several stop strings, the longest counts. So the result does not depend on how the text is split into pieces.
A stop string is detected at its last character, so no further token is generated.

    stops "abcd", "bc"     text "xabcd"  ->  "xa", stopped by "bc"       "bc" is completed before "abcd"
    stops "abc", "bc"      text "xabc"   ->  "x", stopped by "abc"       both are completed at "c": the longer counts
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidTextError


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text that may be sent to the client."""

    text: str
    stop: str | None = None
    """The completed stop string, if any. No further text follows."""


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, and holds back only a possible start of a stop string.

    Cost: a few steps per character and stop string, and one copy of the pending text per piece.
    """

    __slots__ = ("_is_over", "_pending", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidTextError("expected stop strings of at least one character, got an empty string; leave it out")
        # Longest first: if one character completes several stop strings, the longest is found first.
        self._stops = [_Search(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._pending = ""
        self._is_over = False

    def push(self, text: str) -> Delta:
        """Return the text that may be sent now; at a stop string, the text before it. Later calls then return ""."""
        if self._is_over:
            return Delta("")
        if not self._stops:
            return Delta(text)
        window = self._pending + text
        for end, character in enumerate(text, start=len(self._pending) + 1):
            # Not `any`, which stops early: every search must receive every character.
            completed = [search for search in self._stops if search.feed(character)]
            if completed:
                stop = completed[0].stop
                self._is_over = True
                self._pending = ""
                return Delta(window[: end - len(stop)], stop)
        num_pending = max(search.num_matched for search in self._stops)
        num_sendable = len(window) - num_pending
        self._pending = window[num_sendable:]
        return Delta(window[:num_sendable])

    def flush(self) -> str:
        """Return the pending text at the end of the text, where it can no longer become a stop string."""
        pending, self._pending = self._pending, ""
        self._is_over = True
        return pending


class _Search:
    """Knuth-Morris-Pratt search: `num_matched` is the longest prefix of `stop` that the text so far ends with."""

    __slots__ = ("_failure_table", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._failure_table = [0]
        """Failure table: at index n - 1, how many of n matched characters stay matched if the next one differs."""
        for character in stop[1:]:
            self._failure_table.append(self._step(self._failure_table[-1], character))

    def feed(self, character: str) -> bool:
        """Return whether this character completes the stop string; must not be called again afterwards."""
        self.num_matched = self._step(self.num_matched, character)
        return self.num_matched == len(self.stop)

    def _step(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._failure_table[num_matched - 1]
        return num_matched + (self.stop[num_matched] == character)
