"""A visit: the conversation of one client, turn by turn, as plain data before any text is generated.

Content has names instead of text. A **span** is a name with a number of tokens; spans with the same name begin with the
same content. So shared prefixes are visible from the names, traces with hash ids map directly to spans, and the same
workload can be sent as text, chat messages or token ids.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A named piece of content with a length in tokens. Spans with the same name begin with the same content."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The content that a client adds to the conversation, and the maximum length of the answer."""

    spans: tuple[Span, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(span.num_tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Visit:
    """One client's turns. A turn is sent when the previous answer is complete, with the whole conversation so far."""

    name: str
    turns: tuple[Turn, ...]
    system: tuple[Span, ...] = ()
    """Content before the first turn, such as a system prompt or a document."""
    kind: str = "all"
    """The kind of client in a mixed workload; metrics are reported for each kind."""
    priority: str = "normal"
    """The class: high, normal or low."""
    arrival_s: float | None = None
    """Arrival time, if the workload defines it, as traces do; None: the settings of the load define it."""
