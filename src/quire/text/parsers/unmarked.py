"""Finds tool calls without their format's markers, which small models omit or replace by a code fence. Pure.

    ```json
    {"name": "read_file", "arguments":        up to here it becomes a call, if a tool of that name exists

Until that point it may be ordinary text, so it is held back, at most for the maximum length of the pattern.
"""

import re
from collections.abc import Collection

from quire.text.parsers.tool_format import NAME_PATTERN, ObjectKeys

BLANKS = r"[ \t\r\n]{0,40}"
"""White space between the parts of an object, for both the parser and the grammar."""
FENCE = "```"
LANGUAGE = "[a-z]{0,12}"


def unmarked_pattern(keys: ObjectKeys, name: str) -> str:
    """Return a regular expression for the start of a call of this tool."""
    return "".join(_pieces(keys, re.escape(name)))


class UnmarkedSearch:
    """Searches one text, character by character."""

    def __init__(self, keys: ObjectKeys, names: Collection[str]) -> None:
        pieces = _pieces(keys, f"({NAME_PATTERN})")
        fence = [*FENCE, LANGUAGE, BLANKS]
        self._begun = re.compile(f"{_begun([*fence, *pieces])}|{_begun(pieces)}")
        self._whole = re.compile(f"(?:{''.join(fence)})?{''.join(pieces)}")
        self._names = names
        self._held = ""

    def push(self, character: str) -> tuple[str, str | None]:
        """Return the text that cannot belong to a call, and the name of the tool if its arguments come next."""
        self._held += character
        found = self._whole.fullmatch(self._held)
        if found and found[1] in self._names:
            self._held = ""
            return "", found[1]
        return self._no_longer(), None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _no_longer(self) -> str:
        """The longest prefix of the held text with which no call can start."""
        start = 0
        while start < len(self._held) and not self._begun.fullmatch(self._held, start):
            start += 1
        text, self._held = self._held[:start], self._held[start:]
        return text


def _pieces(keys: ObjectKeys, name: str) -> list[str]:
    """The pieces of the pattern. Each is one character, a name or white space."""
    first, second = ([*f'"{key}"', BLANKS, ":"] for key in (keys.name, keys.arguments))
    return [r"\{", BLANKS, *first, BLANKS, '"', name, '"', BLANKS, ",", BLANKS, *second]


def _begun(pieces: list[str]) -> str:
    """A regular expression for every prefix of the sequence of pieces."""
    pattern = ""
    for piece in reversed(pieces):
        pattern = rf"(?:{piece}(?:\Z|{pattern}))" if pattern else piece
    return pattern
