"""Server-sent events out of bytes as they arrive, and what an event of the OpenAI API says. Pure.

By hand, because a load client must not be what it measures: no text decoding before a whole line is there, one pass.
"""

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"
MAX_LINE_BYTES = 1 << 22
"""A server that sends a longer line is not speaking to us."""


class UnreadableError(ValueError):
    """What came is not what the API says."""


class EventSplitter:
    """Takes bytes, gives back the data of every event that is whole. Lines may end in LF or CRLF."""

    __slots__ = ("_data", "_num_rest", "_rest")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """The beginning of a line, as it came: joined once, when its end is there."""
        self._num_rest = 0
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that ended in this chunk."""
        first, *others = chunk.split(b"\n")
        self._num_rest += len(first)
        self._rest.append(first)
        lines = list[bytes]()
        if others:
            lines = [b"".join(self._rest), *others[:-1]]
            self._rest, self._num_rest = [others[-1]], len(others[-1])
        if self._num_rest > MAX_LINE_BYTES:
            raise UnreadableError(f"expected a line of at most {MAX_LINE_BYTES} bytes in a stream, got more")
        events = []
        for line in lines:
            stripped = line.rstrip(b"\r")
            if stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))
            elif not stripped and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class SseEvent:
    """What one event of a stream says. An empty piece carries no token."""

    piece: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


def read_event(data: bytes) -> SseEvent:
    """One chunk of a completion or a chat completion."""
    try:
        fields = json.loads(data)
        if fields.get("error"):
            return SseEvent(error=_message(fields["error"]))
        choices: Any = fields.get("choices") or ({},)
        return SseEvent(_piece(choices[0]), choices[0].get("finish_reason"), _usage(fields.get("usage")))
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise UnreadableError(f"expected an event of a completion, got {data[:200]!r}") from error


def _piece(choice: dict[str, Any]) -> str:
    """The text; of a chat also what the model thinks or asks of tools, because those are tokens as well."""
    delta = choice.get("delta")
    if delta is None:
        return str(choice.get("text") or "")
    text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
    return str(text) if text else json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        int(usage["prompt_tokens"]),
        int(usage.get("completion_tokens") or 0),
        None if cached is None else int(cached),
    )


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
