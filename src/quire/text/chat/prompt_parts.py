"""Maps positions in a prompt to the client's messages and tools, by index. Pure.

Indices are those of the client's request, before the chat template was applied; None where the origin is unknown.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.text.sandboxed.messages import Rendered

PartKind = Literal["system", "tool", "message", "text"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt, as the client sent it."""

    kind: PartKind
    """`system`: the system text before all other messages. `text`: a raw prompt, or text that the template wrote."""
    index: int
    """Index of the client's message, tool or prompt, from 0."""
    name: str | None = None
    """The tool's name, the message's role, or `template`."""


OF_TEMPLATE = PromptPart("text", 0, "template")


@dataclass(frozen=True, slots=True)
class PartSpan:
    """A range of tokens of one part."""

    first: int
    after: int
    """Index of the first token after the range."""
    part: PromptPart | None
    """None: some unknown part of the client's request."""


class PromptParts:
    """The parts of one prompt."""

    __slots__ = ("_firsts", "_spans")

    def __init__(self, spans: Sequence[PartSpan]) -> None:
        """Create from spans in prompt order; adjacent spans may share one token."""
        self._spans = tuple(spans)
        self._firsts = [span.first for span in self._spans]

    def at(self, position: int) -> PromptPart | None:
        """Return the part of this position. The first token after a part belongs to it, because it shows its end."""
        index = bisect_right(self._firsts, position) - 1
        if index < 0:
            return OF_TEMPLATE
        span, before = self._spans[index], self._spans[index - 1] if index else None
        if before is not None and position < before.after:
            return before.part  # a shared token belongs to the first part
        return span.part if position <= span.after else OF_TEMPLATE


UNKNOWN_PARTS = PromptParts((PartSpan(0, 1 << 62, None),))
"""The parts of a prompt whose origins are unknown."""
AT_START = ("system", "developer")


class NumberedMessages(list[dict[str, Any]]):
    """Messages converted from a client's, not one to one, each with the part that it comes from."""

    def __init__(self, messages: Iterable[dict[str, Any]], parts: Iterable[PromptPart | None]) -> None:
        super().__init__(messages)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, numbered: Sequence[tuple[dict[str, Any], int]]) -> "NumberedMessages":
        """Return messages, each with the index of the client's message that it was converted from."""
        parts = [PromptPart("message", at, _role(message)) for message, at in numbered]
        return cls([message for message, _ in numbered], parts)

    def behind(self, others: Sequence[dict[str, Any]]) -> "NumberedMessages":
        """Return these messages after `others`, which have no index. Leading system messages are one part."""
        messages = [*others, *self]
        return NumberedMessages(messages, _with_system(messages, [*[None] * len(others), *self.parts]))


def message_parts(messages: Sequence[Mapping[str, Any]]) -> list[PromptPart | None]:
    """Return the part of each message. Leading system messages are one part."""
    if isinstance(messages, NumberedMessages):
        return list(messages.parts)
    return _with_system(messages, [PromptPart("message", at, _role(message)) for at, message in enumerate(messages)])


def _with_system(messages: Sequence[Mapping[str, Any]], parts: Sequence[PromptPart | None]) -> list[PromptPart | None]:
    num_first = num_system(messages)
    return [*[PromptPart("system", 0)] * num_first, *parts[num_first:]]


def num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of leading system and developer messages."""
    return next((at for at, message in enumerate(messages) if _role(message) not in AT_START), len(messages))


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


CharSpan = tuple[int, int, str | None]
"""(start, stop, label): characters from one message or tool; label None: unknown origin."""


def char_spans(rendered: Rendered) -> list[CharSpan]:
    """Return the spans of text that the client wrote, in order; consecutive spans of one origin are merged."""
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
"""A prompt with more spans is not mapped, because each span needs two binary searches over the tokens."""


def prompt_parts(
    rendered: Rendered,
    num_tokens: int,
    chars_of: Callable[[int], tuple[int, int] | None],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[str] = (),
) -> PromptParts:
    """Return the parts of a rendered conversation by token position. `messages` and the tool names `tools` are those
    that the template received; `chars_of` returns the character range of a token."""
    spans, found, low = char_spans(rendered), list[PartSpan](), 0
    if len(spans) > MAX_SPANS:
        return UNKNOWN_PARTS
    tokens, parts = range(num_tokens), message_parts(messages)

    def part_of(label: str) -> PromptPart | None:
        index = int(label[1:])
        if label.startswith("m"):
            return parts[index] if index < len(parts) else None
        return PromptPart("tool", index, tools[index]) if index < len(tools) else None

    def place_of(token: int) -> tuple[int, int]:
        place = chars_of(token)
        if place is None:
            raise LookupError(token)
        return place

    try:
        for start, stop, label in spans:
            first = bisect_right(tokens, start, lo=low, key=lambda token: place_of(token)[1])
            after = bisect_left(tokens, stop, lo=first, key=lambda token: place_of(token)[0])
            if first < after:
                found.append(PartSpan(first, after, None if label is None else part_of(label)))
            low = max(low, first)
    except LookupError:
        return UNKNOWN_PARTS
    return PromptParts(found)
