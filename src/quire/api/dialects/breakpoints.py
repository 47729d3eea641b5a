"""Breakpoints: places in a client's request up to which its prompt stays cached for a time that the client wrote.

    request   cache_control, prompt_cache_breakpoint ─► Breakpoint: a part of the request, or all of it, and a time
    prompt    tokens of the parts                    ─► PromptPin: a number of tokens, and a time

A breakpoint without a time is only a mark: every prompt is cached anyway. A prefix is kept in whole blocks, so a
breakpoint within a block keeps the blocks before it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.http.errors import invalid, shortened
from quire.client.prefix.reuse_log import SYSTEM_ROLES, PartKind, PromptParts
from quire.core.request import PromptPin

MAX_BREAKPOINTS = 4
"""Of more breakpoints in a request, the last in the prompt count."""
MAX_KEEP_S = 12 * 3600
TTL = re.compile(r"(\d{1,5})([smh])", re.ASCII)
UNIT_S = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place in a request, and how long its prompt is kept up to there."""

    keep_s: float
    kind: PartKind | None = None
    """The kind of the part; None: the whole prompt."""
    index: int = 0
    """Index of the client's message or tool."""
    is_at_end: bool = True
    """Whether it is at the end of the part. Within a part, the prompt is kept up to the part's beginning."""


def keep_seconds(ttl: object, parameter: str) -> float:
    """Return the seconds of a ttl such as `5m` or `1h`. Raises ApiError if it is invalid or above 12 hours."""
    match = TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    keep_s = int(match[1]) * UNIT_S[match[2]] if match is not None else 0
    if not 0 < keep_s <= MAX_KEEP_S:
        message = f"expected a ttl from 1s to 12h, such as 5m or 1h, got {shortened(ttl)}"
        raise invalid(message, parameter, "invalid_parameter")
    return float(keep_s)


def block_breakpoints(
    blocks: object, name: str, default_ttl: object, kind: PartKind, index: int
) -> Iterator[Breakpoint]:
    """Yield the breakpoints with a ttl among the content blocks of a part. `name` is the field of a breakpoint."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        return
    for number, block in enumerate(blocks):
        mark = block.get(name) if isinstance(block, Mapping) else None
        if isinstance(mark, Mapping) and (ttl := mark.get("ttl", default_ttl)) is not None:
            yield Breakpoint(keep_seconds(ttl, name), kind, index, is_at_end=number == len(blocks) - 1)


def prompt_pins(breakpoints: Sequence[Breakpoint], parts: PromptParts, num_tokens: int) -> tuple[PromptPin, ...]:
    """Return the pins of a prompt. Breakpoints at parts that are not found in the prompt are ignored."""
    pins = list[PromptPin]()
    for one in breakpoints:
        end = num_tokens if one.kind is None else _position(one, parts)
        if end:
            pins.append(PromptPin(end, one.keep_s))
    return tuple(sorted(pins, key=lambda pin: pin.num_tokens)[-MAX_BREAKPOINTS:])


def _position(one: Breakpoint, parts: PromptParts) -> int:
    spans = [span for span in parts if span.part is not None and span.part.kind == one.kind]
    spans = [span for span in spans if span.part is not None and span.part.index == one.index]
    if not spans:
        return 0
    return max(span.end for span in spans) if one.is_at_end else min(span.first for span in spans)


def part_kind(role: object, index: int, messages: Sequence[Mapping[str, Any]]) -> tuple[PartKind, int]:
    """Return the kind and index of a message's part: leading system messages are one part of the prompt."""
    is_leading = all(message.get("role") in SYSTEM_ROLES for message in messages[: index + 1])
    return ("system", 0) if is_leading and role in SYSTEM_ROLES else ("message", index)
