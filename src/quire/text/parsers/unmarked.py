"""Finds tool calls without their format's markers, which small models omit or replace by a code fence. Pure.

    ```json
    {"name": "read_file", "arguments":        this text starts a call, if a tool of that name exists

Until the text is complete, it may be ordinary text. So it is held back, at most for the maximum length of the pattern.
"""

import re
from collections.abc import Collection

from quire.text.parsers.tool_format import NAME_PATTERN, ObjectKeys

BLANKS = r"[ \t\r\n]{0,40}"
"""Pattern of white space in an object, used by the parser and by the grammar."""
FENCE = "```"
LANGUAGE = "[a-z]{0,12}"


def unmarked_pattern(keys: ObjectKeys, name: str) -> str:
    """Return a regular expression for the start of a call of this tool."""
    return "".join(_pieces(keys, re.escape(name)))


class UnmarkedSearch:
    """Searches one text for the start of a call, character by character."""

    def __init__(self, keys: ObjectKeys, names: Collection[str]) -> None:
        pieces = _pieces(keys, f"({NAME_PATTERN})")
        fence = [*FENCE, LANGUAGE, BLANKS]
        self._prefixes = re.compile(f"{_prefix_pattern([*fence, *pieces])}|{_prefix_pattern(pieces)}")
        self._pattern = re.compile(f"(?:{''.join(fence)})?{''.join(pieces)}")
        self._names = names
        self._pending = ""

    def push(self, character: str) -> tuple[str, str | None]:
        """Return the text that cannot belong to a call, and the name of the tool if its arguments come next."""
        self._pending += character
        match = self._pattern.fullmatch(self._pending)
        if match and match[1] in self._names:
            self._pending = ""
            return "", match[1]
        return self._release(), None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        pending, self._pending = self._pending, ""
        return pending

    def _release(self) -> str:
        """Remove and return the longest prefix of the pending text with which no call can start."""
        start = 0
        while start < len(self._pending) and not self._prefixes.fullmatch(self._pending, start):
            start += 1
        text, self._pending = self._pending[:start], self._pending[start:]
        return text


def _pieces(keys: ObjectKeys, name: str) -> list[str]:
    """The pieces of the pattern. Each is one character, a name or white space."""
    first, second = ([*f'"{key}"', BLANKS, ":"] for key in (keys.name, keys.arguments))
    return [r"\{", BLANKS, *first, BLANKS, '"', name, '"', BLANKS, ",", BLANKS, *second]


def _prefix_pattern(pieces: list[str]) -> str:
    """Return a regular expression that matches every prefix of the sequence of pieces."""
    pattern = ""
    for piece in reversed(pieces):
        pattern = rf"(?:{piece}(?:\Z|{pattern}))" if pattern else piece
    return pattern
