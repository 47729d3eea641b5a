"""The kinds of parts that an answer has. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """What the answer says."""


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thinks before it answers."""


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The arguments of one call, as the model writes them: JSON, never read and written again."""

    call_index: int
    """Which of the answer's calls, from 0."""
    call_id: str
    name: str


Part = TextPart | ReasoningPart | ToolCallPart
"""An answer is a row of parts, each as long as it likes. Where the part of a piece differs from the one before it, an
API ends the one and begins the other: a call is announced by its first piece, with its id and name."""

TEXT = TextPart()
REASONING = ReasoningPart()
