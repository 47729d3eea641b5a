"""Removes the lines that an operator lists in `stable_prefix` from system texts, before templates are applied. Pure.

Only the leading system and developer messages of a conversation are examined, line by line; messages of users,
assistants and tools are never changed. The other lines keep their order and text. Removed lines are returned.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from quire.errors import ConfigError
from quire.text.chat.changing_text import ChangingKind, line_pattern
from quire.text.chat.prompt_parts import NumberedMessages

BILLING_HEADER = "x-anthropic-billing-header:"
BUILT_IN = ("dates", "times", "ids", "billing-header")
MAX_PATTERNS = 16
MAX_PATTERN_CHARS = 200
MAX_MATCHED_CHARS = 256
"""Longer lines are never removed."""
REGEX_SYNTAX = re.compile(r"[\\\[\](){}^$|+]|\.[*?]")
"""Syntax that is rejected: prereleases of 0.2.0 accepted regular expressions, which have another meaning as globs."""
MAX_LINES = 512
"""Only the first lines of a system text, up to this many, are examined."""
MAX_LABEL_WORDS = 8
"""A line counts as only a date, time or id if it has at most this many other words."""
WORD = re.compile(r"[^\W\d_]{2,}")
PLACEHOLDERS = re.compile(r"<[a-z]{1,6}>")


@dataclass(frozen=True, slots=True)
class RemovedLine:
    """A line that was removed."""

    text: str
    pattern: str
    """The built-in name (see `BUILT_IN`) or the glob that matched."""


class StablePrefix:
    """The operator's list of lines to remove."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Create from names in `BUILT_IN`, or globs that match a whole line. Raises ConfigError."""
        if len(patterns) > MAX_PATTERNS:
            raise ConfigError(
                f"expected at most {MAX_PATTERNS} patterns of stable_prefix, got {len(patterns)}; leave some out",
                ("stable_prefix",),
                code="too_many_patterns",
            )
        self._names = frozenset(patterns) & frozenset(BUILT_IN)
        self._globs = [(source, _glob(source)) for source in patterns if source not in self._names]

    def remove_lines(self, messages: Sequence[Any]) -> tuple[Sequence[Any], Sequence[RemovedLine]]:
        """Return the conversation without the lines that match, and these lines. An item that is not a mapping is not
        changed here; a later step rejects it."""
        result, removed = list(messages), list[RemovedLine]()
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in ("system", "developer"):
                break
            result[index] = self._message(message, removed)
        if not removed:
            return messages, ()
        parts = messages.parts if isinstance(messages, NumberedMessages) else None
        return (result if parts is None else NumberedMessages(result, parts)), removed

    def _message(self, message: Mapping[str, Any], removed: list[RemovedLine]) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._text(content, removed)}
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._part(part, removed) for part in content]}

    def _part(self, part: Any, removed: list[RemovedLine]) -> Any:
        text = part.get("text") if isinstance(part, Mapping) else None
        return {**part, "text": self._text(text, removed)} if isinstance(text, str) else part

    def _text(self, text: str, removed: list[RemovedLine]) -> str:
        lines = text.split("\n", MAX_LINES)
        remaining = list[str]()
        for index, line in enumerate(lines):
            pattern = self._matching_pattern(line) if index < MAX_LINES else None
            if pattern is None:
                remaining.append(line)
            else:
                removed.append(RemovedLine(line, pattern))
        return "\n".join(remaining)

    def _matching_pattern(self, line: str) -> str | None:
        """Return the built-in name or the glob that matches this line, if any."""
        stripped = line.strip()
        if not stripped or len(stripped) > MAX_MATCHED_CHARS:
            return None
        if "billing-header" in self._names and stripped.lower().startswith(BILLING_HEADER):
            return "billing-header"
        matching_glob = next((source for source, glob in self._globs if glob.match(stripped)), None)
        return matching_glob or (self._matching_name(stripped) if self._names else None)

    def _matching_name(self, line: str) -> str | None:
        pattern = line_pattern(line)
        kinds: Sequence[ChangingKind] = ("dates", "times", "ids")
        name = next((kind for kind in kinds if kind in pattern.kinds and kind in self._names), None)
        if name is None or len(WORD.findall(PLACEHOLDERS.sub(" ", pattern.pattern))) > MAX_LABEL_WORDS:
            return None
        return name


def _glob(source: str) -> re.Pattern[str]:
    """Compile a glob: `*` is any text, `?` any character. `translate` yields a pattern without backtracking over
    earlier `*`, so the work is bounded by line length times glob length. Raises ConfigError."""
    if not 0 < len(source) <= MAX_PATTERN_CHARS or REGEX_SYNTAX.search(source):
        raise ConfigError(
            f"stable_prefix: expected a name or a glob of up to {MAX_PATTERN_CHARS} characters, got {source[:80]!r}; "
            "regular expressions are not supported: write * for any text and ? for any character, such as 'Date: *'",
            ("stable_prefix",),
        )
    return re.compile(translate(source))


def without_lines(messages: Sequence[Any], prefix: StablePrefix | None) -> tuple[Sequence[Any], Sequence[RemovedLine]]:
    """Return the conversation to render and the lines removed from it; unchanged if `prefix` is None."""
    return (messages, ()) if prefix is None else prefix.remove_lines(messages)
