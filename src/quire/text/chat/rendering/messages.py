"""Messages as clients send them, made into what published chat templates read. Pure; imports errors alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidTextError
from quire.strict_json import has_too_many_lists

Message = Mapping[str, Any]
"""As in the OpenAI API: `role`, `content` (a text, none, or a list of text parts), perhaps `tool_calls` and others."""

ROLES = frozenset(
    {
        "assistant",
        "available_tools",
        "context",
        "developer",
        "document",
        "documents",
        "function",
        "ipython",
        "model",
        "observation",
        "system",
        "tool",
        "tool_calls",
        "tool_response",
        "tool_results",
        "user",
    }
)
"""Names that published templates know. A role is a name and not text: templates build control tokens with it, as in
`'<|' + role + '|>'`, so no other is let through."""


def prepare_messages(messages: Sequence[Message], *, wants_parts: bool) -> list[dict[str, Any]]:
    """New messages whose content is one text, or a list of parts where the template wants that."""
    if not messages:
        raise InvalidTextError("expected at least one message, got none", code="no_messages")
    return [_prepare(message, index, wants_parts) for index, message in enumerate(messages)]


def num_text_bytes(value: Any) -> int:
    """Bytes of all texts in it, at least, whatever lists and mappings they lie in."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(map(num_text_bytes, value)) + sum(map(num_text_bytes, value.values()))
    return sum(map(num_text_bytes, value)) if isinstance(value, list | tuple) else 0


def _prepare(message: Message, index: int, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        rule = f"expected a role in every message, message {index} has none; add one, such as 'user'"
        raise InvalidTextError(rule, code="role_missing")
    if message["role"] not in ROLES:
        allowed = ", ".join(sorted(ROLES))
        rule = f"expected the role to be one of {allowed}, got {message['role'][:40]!r} in message {index}"
        raise InvalidTextError(f"{rule}; use one of these", code="unknown_role")
    prepared = dict(message)
    texts = texts_of(message, index)
    prepared["content"] = [{"type": "text", "text": text} for text in texts] if wants_parts else "".join(texts)
    if calls := calls_of(message, index):
        prepared["tool_calls"] = [_with_read_arguments(call) for call in calls]
    return prepared


def calls_of(message: Message, index: int) -> list[Any]:
    """The calls of this message, or InvalidTextError."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        kind = type(calls).__name__
        rule = f"expected tool_calls to be a list, got {kind} in message {index}; send a list, or leave it out"
        raise InvalidTextError(rule, code="invalid_tool_calls")
    return calls


def texts_of(message: Message, index: int) -> list[str]:
    """The texts of this message's content, or InvalidTextError."""
    content = message.get("content")
    if content is None:  # an assistant that only called tools: many templates want a text all the same
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        kind = type(content).__name__
        rule = f"expected content to be a string or a list of parts, got {kind} in message {index}; send a string"
        raise InvalidTextError(rule, code="invalid_content")
    return [_text_of(part, index) for part in content]


def _text_of(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        rule = f"expected message parts of type 'text', got {kind!r} in message {index}; leave it out"
        raise InvalidTextError(rule, code="unsupported_message_part")
    return text


def _with_read_arguments(call: Any) -> Any:
    """The wire has a call's arguments as JSON in a text; templates write them out as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    read = read_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


def read_arguments(arguments: object) -> object:
    """A call's arguments as an object, or as they are where they are no JSON or too much of it to be made."""
    if not isinstance(arguments, str) or has_too_many_lists(arguments):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
