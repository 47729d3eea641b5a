"""What one client sends to a server, turn by turn: plain data, before any text of it is written.

Content is named, not spelled: a **span** is so many tokens under a name, and spans of one name begin with the same
content. What two prompts have in common can then be read off their names, a published trace of hashes is spans already,
and the same workload can be sent as text, as chat messages or as token ids.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """So many tokens of content. Two of one name begin with the same content."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client adds to the conversation, and how long an answer it requests."""

    spans: tuple[Span, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Visit:
    """One client's turns. Each is sent when the answer to the one before has come, and has the whole conversation."""

    name: str
    turns: tuple[Turn, ...]
    system: tuple[Span, ...] = ()
    """Sent before the first turn: a system prompt, a document."""
    kind: str = "all"
    """Which class of a mixed workload it belongs to; figures are reported for each."""
    priority: str = "normal"
    """high, normal or low."""
    arrival_s: float | None = None
    """When it comes, if the workload has it: a trace does. Else the load decides."""
