"""Maps positions in a prompt to the client's messages and tools, by index. Pure.

Indices are those of the client's request, before the chat template was applied; None where the origin is unknown.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


TEMPLATE_PART = PromptPart("text", 0, "template")


@dataclass(frozen=True, slots=True)
class PartSpan:
    """A range of tokens of one part."""

    first: int
    end: int
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
        """Return the part at this position. The first token after a part belongs to the part, whose end it shows."""
        index = bisect_right(self._firsts, position) - 1
        if index < 0:
            return TEMPLATE_PART
        span, previous = self._spans[index], self._spans[index - 1] if index else None
        if previous is not None and position < previous.end:
            return previous.part  # a shared token belongs to the first part
        return span.part if position <= span.end else TEMPLATE_PART

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[PartSpan]:
        return iter(self._spans)

    def at_or_after(self, position: int) -> PartSpan | None:
        """Return the span that contains this position, or else the next one; None: only the template's text follows."""
        index = max(0, bisect_right(self._firsts, position) - 1)
        return next((span for span in self._spans[index : index + 2] if position < span.end), None)


UNKNOWN_PARTS = PromptParts((PartSpan(0, 1 << 62, None),))
"""The parts of a prompt whose origins are unknown."""
SYSTEM_ROLES = ("system", "developer")


class NumberedMessages(list[dict[str, Any]]):
    """Messages that were converted from a client's messages, but not one to one. `parts` has the origin of each."""

    def __init__(self, messages: Iterable[dict[str, Any]], parts: Iterable[PromptPart | None]) -> None:
        super().__init__(messages)
        self.parts = tuple(parts)

    @classmethod
    def with_indices(cls, numbered: Sequence[tuple[dict[str, Any], int]]) -> "NumberedMessages":
        """Return messages, each with the index of the client's message that it was converted from."""
        parts = [PromptPart("message", index, _role(message)) for message, index in numbered]
        return cls([message for message, _ in numbered], parts)

    def preceded_by(self, others: Sequence[dict[str, Any]]) -> "NumberedMessages":
        """Return `others`, which have no index, followed by these messages. Leading system messages are one part."""
        messages = [*others, *self]
        return NumberedMessages(messages, _with_system(messages, [*[None] * len(others), *self.parts]))


def message_parts(messages: Sequence[Mapping[str, Any]]) -> list[PromptPart | None]:
    """Return the part of each message. Leading system messages are one part."""
    if isinstance(messages, NumberedMessages):
        return list(messages.parts)
    roles = enumerate(map(_role, messages))
    return _with_system(messages, [PromptPart("message", index, role) for index, role in roles])


def _with_system(messages: Sequence[Mapping[str, Any]], parts: Sequence[PromptPart | None]) -> list[PromptPart | None]:
    return [*[PromptPart("system", 0)] * (num_leading := num_system(messages)), *parts[num_leading:]]


def num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of leading system and developer messages."""
    return next((index for index, role in enumerate(map(_role, messages)) if role not in SYSTEM_ROLES), len(messages))


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


CharSpan = tuple[int, int, str | None]
"""(start, stop, label): characters from one message or tool; label None: unknown origin."""


def char_spans(rendered: Rendered) -> list[CharSpan]:
    """Return the spans of text that the client wrote, in order; consecutive spans of one origin are merged."""
    spans, position = list[CharSpan](), 0
    labeled = iter((*rendered.labeled_spans, (len(rendered.text), len(rendered.text), "")))
    span = next(labeled)
    for start, stop in rendered.client_spans:
        position = max(position, start)
        while position < stop:
            while span[1] <= position and span[1] < len(rendered.text):
                span = next(labeled)
            is_labeled = span[0] <= position < span[1]
            end = min(stop, span[1] if is_labeled else span[0] if span[0] > position else stop)
            label = span[2] if is_labeled else None
            if spans and spans[-1][2] == label and label is not None:
                spans[-1] = (spans[-1][0], end, label)
            else:
                spans.append((position, end, label))
            position = end
    return spans


MAX_SPANS = 4096
"""Prompts with more spans are not mapped, because each span needs two binary searches over the tokens."""


def prompt_parts(
    rendered: Rendered,
    num_tokens: int,
    chars_of: Callable[[int], tuple[int, int] | None],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[str] = (),
) -> PromptParts:
    """Return the parts of a rendered conversation by token position. `messages` and the tool names `tools` are those
    that the template received; `chars_of` returns the character range of a token."""
    spans, ranges, low = char_spans(rendered), list[PartSpan](), 0
    if len(spans) > MAX_SPANS:
        return UNKNOWN_PARTS
    tokens, parts = range(num_tokens), message_parts(messages)

    def part_of(label: str) -> PromptPart | None:
        index = int(label[1:])
        if label.startswith("m"):
            return parts[index] if index < len(parts) else None
        return PromptPart("tool", index, tools[index]) if index < len(tools) else None

    def char_range(token: int) -> tuple[int, int]:
        chars = chars_of(token)
        if chars is None:
            raise LookupError(token)
        return chars

    try:
        for start, stop, label in spans:
            first = bisect_right(tokens, start, lo=low, key=lambda token: char_range(token)[1])
            end = bisect_left(tokens, stop, lo=first, key=lambda token: char_range(token)[0])
            if first < end:
                ranges.append(PartSpan(first, end, None if label is None else part_of(label)))
            low = max(low, first)
    except LookupError:
        return UNKNOWN_PARTS
    return PromptParts(ranges)
