"""Removes lines that the operator lists from system texts, before the chat template is applied. Pure.

Only the leading system and developer messages of a conversation are examined, line by line; messages of users and
assistants and tools are never changed. The other lines keep their order and text. Removed lines are returned.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from quire.errors import ConfigError
from quire.text.chat.changing_text import ChangingKind, fold
from quire.text.chat.prompt_parts import NumberedMessages

BILLING_HEADER = "x-anthropic-billing-header:"
BUILT_IN = ("dates", "times", "ids", "billing-header")
MAX_PATTERNS = 16
MAX_PATTERN_CHARS = 200
MAX_MATCHED_CHARS = 256
"""Longer lines are never removed."""
OF_REGULAR_EXPRESSIONS = re.compile(r"[\\\[\](){}^$|+]|\.[*?]")
"""Prereleases of 0.2.0 took regular expressions, which as globs would silently match other lines."""
MAX_LINES = 512
"""Only the first lines of a system text, up to this many, are examined."""
MAX_LABEL_WORDS = 8
"""A line counts as only a date, time or id if it has at most this many other words."""
WORD = re.compile(r"[^\W\d_]{2,}")
NAMES = re.compile(r"<[a-z]{1,6}>")


@dataclass(frozen=True, slots=True)
class RemovedLine:
    """A line that was removed."""

    text: str
    by: str
    """The built-in name or the glob that matched."""


class StablePrefix:
    """The operator's list of lines to remove."""

    def __init__(self, listed: Sequence[str] = ()) -> None:
        """Create from names in `BUILT_IN`, or globs that match a whole line. Raises ConfigError."""
        if len(listed) > MAX_PATTERNS:
            raise ConfigError(
                f"expected at most {MAX_PATTERNS} patterns of stable_prefix, got {len(listed)}; leave some out",
                ("stable_prefix",),
                code="too_many_patterns",
            )
        self._names = frozenset(listed) & frozenset(BUILT_IN)
        self._globs = [(source, _glob(source)) for source in listed if source not in self._names]

    def cleaned(self, messages: Sequence[Any]) -> tuple[Sequence[Any], Sequence[RemovedLine]]:
        """Return the conversation without the listed lines, and these lines. An item that is not a mapping is kept; a
        later step rejects it."""
        made, removed = list(messages), list[RemovedLine]()
        for at, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in ("system", "developer"):
                break
            made[at] = self._message(message, removed)
        if not removed:
            return messages, ()
        parts = messages.parts if isinstance(messages, NumberedMessages) else None
        return (made if parts is None else NumberedMessages(made, parts)), removed

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
        kept = list[str]()
        for at, line in enumerate(lines):
            by = self._by(line) if at < MAX_LINES else None
            if by is None:
                kept.append(line)
            else:
                removed.append(RemovedLine(line, by))
        return "\n".join(kept)

    def _by(self, line: str) -> str | None:
        """The name or glob that matches this line, if any."""
        bare = line.strip()
        if not bare or len(bare) > MAX_MATCHED_CHARS:
            return None
        if "billing-header" in self._names and bare.lower().startswith(BILLING_HEADER):
            return "billing-header"
        found = next((source for source, glob in self._globs if glob.match(bare)), None)
        return found or (self._name(bare) if self._names else None)

    def _name(self, line: str) -> str | None:
        folded = fold(line)
        kinds: Sequence[ChangingKind] = ("dates", "times", "ids")
        name = next((kind for kind in kinds if kind in folded.kinds and kind in self._names), None)
        if name is None or len(WORD.findall(NAMES.sub(" ", folded.pattern))) > MAX_LABEL_WORDS:
            return None
        return name


def _glob(source: str) -> re.Pattern[str]:
    """Compile a glob: `*` is any text, `?` any character. `translate` yields a pattern without backtracking over
    earlier `*`, so the work is bounded by line length times glob length. Raises ConfigError."""
    if not 0 < len(source) <= MAX_PATTERN_CHARS or OF_REGULAR_EXPRESSIONS.search(source):
        raise ConfigError(
            f"stable_prefix: expected a name or a glob of up to {MAX_PATTERN_CHARS} characters, got {source[:80]!r}; "
            "regular expressions are not supported: write * for any text and ? for any character, such as 'Date: *'",
            ("stable_prefix",),
        )
    return re.compile(translate(source))


def without_lines(messages: Sequence[Any], listed: StablePrefix | None) -> tuple[Sequence[Any], Sequence[RemovedLine]]:
    """Return the conversation to render and the lines removed from it; unchanged if `listed` is None."""
    return (messages, ()) if listed is None else listed.cleaned(messages)
