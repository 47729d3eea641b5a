"""Finds a call that stands in a text without the mark of its format: small models leave it out, or write a fence. Pure.

    ```json
    {"name": "read_file", "arguments":        so much makes it a call, if there is a tool of that name

Until then it is a text like any other, so it is held back: at most as long as the pattern may be.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from quire.text.parsers.tool_format import NAME_PATTERN, ObjectKeys

BLANKS = r"[ \t\r\n]{0,40}"
"""Between the parts of an object, in readers and in grammars alike."""
FENCE = "```"
LANGUAGE = "[a-z]{0,12}"


def unmarked_pattern(keys: ObjectKeys, name: str) -> str:
    """A regular expression of what begins a call of this tool."""
    return "".join(_pieces(keys, re.escape(name)))


@dataclass(frozen=True, slots=True)
class Searched:
    """What one more character told."""

    text: str
    """What is certainly no call."""
    name: str | None = None
    """The tool whose call has begun: its arguments come next."""


class UnmarkedSearch:
    """One text, character by character."""

    def __init__(self, keys: ObjectKeys, names: Collection[str]) -> None:
        pieces = _pieces(keys, f"({NAME_PATTERN})")
        fence = [*FENCE, LANGUAGE, BLANKS]
        self._begun = re.compile(f"{_begun([*fence, *pieces])}|{_begun(pieces)}")
        self._whole = re.compile(f"(?:{''.join(fence)})?{''.join(pieces)}")
        self._names = names
        self._held = ""

    def push(self, character: str) -> Searched:
        """Hold the character back, or say what was held."""
        self._held += character
        found = self._whole.fullmatch(self._held)
        if found and found[1] in self._names:
            self._held = ""
            return Searched("", found[1])
        return Searched(self._no_longer())

    def flush(self) -> str:
        """What is held back, which will be no call."""
        held, self._held = self._held, ""
        return held

    def _no_longer(self) -> str:
        """From the front of what is held, what no call can begin with."""
        start = 0
        while start < len(self._held) and not self._begun.fullmatch(self._held, start):
            start += 1
        text, self._held = self._held[:start], self._held[start:]
        return text


def _pieces(keys: ObjectKeys, name: str) -> list[str]:
    """Of the pattern, each matched whole or not at all but for blanks and names."""
    first, second = ([*f'"{key}"', BLANKS, ":"] for key in (keys.name, keys.arguments))
    return [r"\{", BLANKS, *first, BLANKS, '"', name, '"', BLANKS, ",", BLANKS, *second]


def _begun(pieces: list[str]) -> str:
    """A regular expression of all that the pieces in a row may begin with."""
    pattern = ""
    for piece in reversed(pieces):
        pattern = rf"(?:{piece}(?:\Z|{pattern}))" if pattern else piece
    return pattern
