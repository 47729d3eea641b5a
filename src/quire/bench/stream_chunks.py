"""What an event of the OpenAI API says. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from quire.errors import MessageError


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one event of a stream says. An empty piece carries no token."""

    piece: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


def read_chunk(data: bytes) -> StreamChunk:
    """One chunk of a completion or a chat completion."""
    try:
        fields = json.loads(data)
        if fields.get("error"):
            return StreamChunk(error=_message(fields["error"]))
        choices: Any = fields.get("choices") or ({},)
        return StreamChunk(_piece(choices[0]), choices[0].get("finish_reason"), _usage(fields.get("usage")))
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"expected an event of a completion, got {data[:200]!r}") from error


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
