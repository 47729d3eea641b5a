"""Regular expressions that an operator writes and clients' lines are held against: a few forms, and a bound of work.

The library's matcher goes back and tries again, and a line made for it can keep it busy for years. So a pattern is read
here first, and refused unless the ways there are through it, times the places a line gives each open repeat, stay few:

    x · [a-z] · \\d · . · (a|b) · (?:a|b)     matched once
    x? · x{2,5} · (…)?                        2, 4, 2 ways
    x* · x+ · x{2,}                           as many ways as a line has characters
    (x+)* · (…){2,} · \\1 · (?=…) · ^ · $      refused
"""

import re
from dataclasses import dataclass

from quire.errors import ConfigError

MAX_PATTERN_CHARS = 200
MAX_MATCHED_CHARS = 256
"""A longer line is matched by none."""
MAX_WAYS = 1 << 17
CLASSES = frozenset("dDwWsS")
CONTROL = {"t": "\t"}
SPECIAL = frozenset("()[]{}|*+?.^$\\")
REPEAT = re.compile(r"\{([0-9]{1,4})(?:(,)([0-9]{1,4})?)?\}")


class _RefusedPatternError(Exception):
    """Why a pattern is none of ours."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a pattern: in how many ways it may match."""

    ways: int
    is_single: bool = False
    """One character."""


def line_pattern(source: str) -> re.Pattern[str]:
    """The pattern, to be matched with a whole line. Raises ConfigError."""
    try:
        if not 0 < len(source) <= MAX_PATTERN_CHARS:
            raise _RefusedPatternError(f"expected 1 to {MAX_PATTERN_CHARS} characters, got {len(source)}")
        ways = _Reader(source).read()
        if ways > MAX_WAYS:
            raise _RefusedPatternError(
                f"a line could match in more than {MAX_WAYS:,} ways; use at most two of * and +, and fewer alternatives"
            )
        return re.compile(source)
    except (_RefusedPatternError, re.error) as error:
        raise ConfigError(
            f"stable_prefix: expected a name or a plain regular expression, got {source[:80]!r}: {error}",
            ("stable_prefix",),
        ) from None


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def read(self) -> int:
        """In how many ways a line may match."""
        ways = self._alternatives()
        if self._at < len(self._source):
            raise _RefusedPatternError("unmatched )")
        return ways

    def _alternatives(self) -> int:
        ways = self._sequence()
        while self._takes("|"):
            ways += self._sequence()
        return ways

    def _sequence(self) -> int:
        ways = 1
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            ways = min(ways * self._repeated(self._piece()), MAX_WAYS + 1)
        return ways

    def _piece(self) -> _Piece:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            self._class()
        elif char == "\\":
            self._escape()
        elif char in SPECIAL and char not in "{}].":
            raise _RefusedPatternError(f"{char} is not allowed there; patterns match whole lines, without ^ and $")
        return _Piece(1, is_single=True)

    def _group(self) -> _Piece:
        if self._takes("?") and not self._takes(":"):
            raise _RefusedPatternError("expected a group as (…) or (?:…)")
        ways = self._alternatives()
        if not self._takes(")"):
            raise _RefusedPatternError("unmatched (")
        return _Piece(ways)

    def _class(self) -> None:
        self._takes("^")
        self._takes("]")
        while (char := self._next()) != "]":
            if char == "\\":
                self._escape()
            elif char == "[":
                raise _RefusedPatternError("write a [ within [ ] as \\[")

    def _escape(self) -> None:
        char = self._next()
        if char.isalnum() and char not in CLASSES and char not in CONTROL:
            raise _RefusedPatternError(
                f"\\{char} is not supported; \\d \\w \\s \\D \\W \\S \\t and escaped punctuation are"
            )

    def _repeated(self, piece: _Piece) -> int:
        """The ways of a piece with what stands behind it."""
        low, high = self._bounds()
        if (low, high) == (1, 1):
            return piece.ways
        if self._at < len(self._source) and self._source[self._at] in "*+?{":
            raise _RefusedPatternError("repeats of repeats and lazy repeats are not supported")
        if not piece.is_single:
            if (low, high) == (0, 1):
                return piece.ways + 1
            raise _RefusedPatternError("expected a repeat of one character, got a group")
        return (MAX_MATCHED_CHARS if high is None else high) - low + 1

    def _bounds(self) -> tuple[int, int | None]:
        rest = self._source[self._at : self._at + 1]
        if rest and rest in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[rest]
        found = REPEAT.match(self._source, self._at)
        if found is None:
            return 1, 1
        self._at = found.end()
        low = int(found[1])
        high = low if found[2] is None else None if found[3] is None else int(found[3])
        if high is not None and high < low:
            raise _RefusedPatternError(f"the bounds of {found[0]} are reversed")
        return low, high

    def _takes(self, char: str) -> bool:
        is_there = self._source.startswith(char, self._at)
        self._at += is_there
        return is_there

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise _RefusedPatternError("unexpected end")
        self._at += 1
        return self._source[self._at - 1]
