"""Which part of a conversation a token of its prompt belongs to: its client's messages and tools, by number. Pure.

A part is told as a client knows it, before its template wrote it down. Where that cannot be known there is none.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from quire.text.sandboxed.template_messages import Rendered

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
    """None: a client's, but not known which."""


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


UNKNOWN_PARTS = PromptParts((PartSpan(0, 1 << 62, None),))
"""Of a prompt that cannot be taken apart."""
AT_START = ("system", "developer")


class NumberedMessages(list[dict[str, Any]]):
    """Messages that were made out of a client's, not one for one: each with the part it comes from."""

    def __init__(self, messages: Iterable[dict[str, Any]], parts: Iterable[PromptPart | None]) -> None:
        super().__init__(messages)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, numbered: Sequence[tuple[dict[str, Any], int]]) -> "NumberedMessages":
        """Each with the number of the client's own that it was made of."""
        parts = [PromptPart("message", at, _role(message)) for message, at in numbered]
        return cls([message for message, _ in numbered], parts)

    def behind(self, others: Sequence[dict[str, Any]]) -> "NumberedMessages":
        """With others before them, of which the client told no number."""
        return NumberedMessages([*others, *self], [*[None] * len(others), *self.parts])


def message_parts(messages: Sequence[Mapping[str, Any]]) -> list[PromptPart | None]:
    """Which part each message is. Those of the system at the start are one."""
    parts: list[PromptPart | None] = (
        list(messages.parts)
        if isinstance(messages, NumberedMessages)
        else [PromptPart("message", at, _role(message)) for at, message in enumerate(messages)]
    )
    num_first = num_system(messages)
    return [*[PromptPart("system", 0)] * num_first, *parts[num_first:]]


def num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many at the start are the system's."""
    return next((at for at, message in enumerate(messages) if _role(message) not in AT_START), len(messages))


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


class TemplateParts(msgspec.Struct, frozen=True):
    """What a template was handed, in its order."""

    messages: Sequence[PromptPart | None]
    tools: Sequence[PromptPart] = ()

    def of(self, label: str) -> PromptPart | None:
        """The part that the rendering calls so."""
        parts = self.messages if label.startswith("m") else self.tools
        index = int(label[1:])
        return parts[index] if index < len(parts) else None


CharSpan = tuple[int, int, str | None]
"""Characters from start to stop that come from one place; None: not known which."""


def char_spans(rendered: Rendered) -> list[CharSpan]:
    """All that clients wrote, in order. What one place wrote with nothing of another's between is one span."""
    spans, place = list[CharSpan](), 0
    sources = iter((*rendered.sources, (len(rendered.text), len(rendered.text), "")))
    source = next(sources)
    for start, stop in rendered.client:
        place = max(place, start)
        while place < stop:
            while source[1] <= place and source[1] < len(rendered.text):
                source = next(sources)
            is_inside = source[0] <= place < source[1]
            end = min(stop, source[1] if is_inside else source[0] if source[0] > place else stop)
            label = source[2] if is_inside else None
            if spans and spans[-1][2] == label and label is not None:
                spans[-1] = (spans[-1][0], end, label)
            else:
                spans.append((place, end, label))
            place = end
    return spans


MAX_SPANS = 4096
"""A prompt of more is not taken apart: each costs two searches among its tokens."""


def prompt_parts(
    rendered: Rendered, num_tokens: int, chars_of: Callable[[int], tuple[int, int] | None], table: TemplateParts
) -> PromptParts:
    """The parts of a rendered conversation, by its tokens. `chars_of` says which characters a token stands for."""
    spans, found, low = char_spans(rendered), list[PartSpan](), 0
    if len(spans) > MAX_SPANS:
        return UNKNOWN_PARTS
    tokens = range(num_tokens)

    def start_of(token: int) -> int:
        place = chars_of(token)
        if place is None:
            raise LookupError(token)
        return place[0]

    def stop_of(token: int) -> int:
        place = chars_of(token)
        if place is None:
            raise LookupError(token)
        return place[1]

    try:
        for start, stop, label in spans:
            first = bisect_right(tokens, start, lo=low, key=stop_of)
            after = bisect_left(tokens, stop, lo=first, key=start_of)
            if first < after:
                found.append(PartSpan(first, after, None if label is None else table.of(label)))
            low = max(low, first)
    except LookupError:
        return UNKNOWN_PARTS
    return PromptParts(found)
