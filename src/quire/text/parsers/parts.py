"""The kinds of parts of an answer. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """The model's reasoning before the answer."""


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """The arguments of one tool call: the JSON as the model writes it, not parsed and serialized again."""

    call_index: int
    """Index of the call in the answer, from 0."""
    call_id: str
    name: str


Part = TextPart | ReasoningPart | ToolCallPart
"""An answer is a sequence of parts, streamed in pieces. If a piece belongs to another part than the previous piece,
an API ends the previous part and starts the next; the first piece of a call provides its id and name."""

TEXT = TextPart()
REASONING = ReasoningPart()
