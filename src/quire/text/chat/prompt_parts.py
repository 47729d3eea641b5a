"""Which part of a conversation a token of its prompt belongs to: its client's messages and tools, by number. Pure.

A part is told as a client knows it, before its template wrote it down. Where that cannot be known there is none.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PartKind = Literal["system", "tool", "message", "text"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt as its client gave it."""

    kind: PartKind
    """`system`: what stands before all messages. `text`: a prompt that is no conversation, or what the model's template
    wrote itself."""
    index: int
    """Which one of the client's messages or tools, or of its prompts, from 0."""
    name: str | None = None
    """A tool's name, the role of a message, or `template`."""


OF_TEMPLATE = PromptPart("text", 0, "template")


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Tokens of one part."""

    first: int
    after: int
    """The token behind its last."""
    part: PromptPart | None
    """None: a client's, but nobody knows which."""


class PromptParts:
    """The parts of one prompt."""

    __slots__ = ("_firsts", "_spans")

    def __init__(self, spans: Sequence[PartSpan]) -> None:
        """In their order. Two may have one token in common."""
        self._spans = tuple(spans)
        self._firsts = [span.first for span in self._spans]

    def at(self, position: int) -> PromptPart | None:
        """Where this token falls. The first token behind a part counts as its own: it says that the part ends there."""
        index = bisect_right(self._firsts, position) - 1
        if index < 0:
            return OF_TEMPLATE
        span, before = self._spans[index], self._spans[index - 1] if index else None
        if before is not None and position < before.after:
            return before.part  # of a token that both have, the first is told
        return span.part if position <= span.after else OF_TEMPLATE
