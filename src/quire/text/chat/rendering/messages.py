"""Converts messages from clients to the form that published chat templates read. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidTextError
from quire.strict_json import has_too_many_lists

Message = Mapping[str, Any]
"""A message of the OpenAI API: `role`, `content` (a string, null, or a list of text parts), `tool_calls` and others."""

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
"""Roles of published templates. All others are rejected, because templates build control tokens from the role, as in
`'<|' + role + '|>'`."""


def prepare_messages(messages: Sequence[Message], *, wants_parts: bool) -> list[dict[str, Any]]:
    """Return new messages whose content is one string, or a list of parts if `wants_parts`. Raises InvalidTextError."""
    if not messages:
        raise InvalidTextError("expected at least one message, got none", code="no_messages")
    return [_prepare(message, index, wants_parts) for index, message in enumerate(messages)]


def _prepare(message: Message, index: int, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        fault = f"expected a role in every message, got none in message {index}; add one, such as 'user'"
        raise InvalidTextError(fault, code="role_missing")
    if message["role"] not in ROLES:
        allowed = ", ".join(sorted(ROLES))
        fault = f"expected the role to be one of {allowed}, got {message['role'][:40]!r} in message {index}"
        raise InvalidTextError(f"{fault}; use one of these", code="unknown_role")
    prepared = dict(message)
    texts = texts_of(message, index)
    prepared["content"] = [{"type": "text", "text": text} for text in texts] if wants_parts else "".join(texts)
    if calls := calls_of(message, index):
        prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return prepared


def calls_of(message: Message, index: int) -> list[Any]:
    """Return the tool calls of this message. Raises InvalidTextError."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        kind = type(calls).__name__
        fault = f"expected tool_calls to be a list, got {kind} in message {index}; send a list, or leave it out"
        raise InvalidTextError(fault, code="invalid_tool_calls")
    return calls


def texts_of(message: Message, index: int) -> list[str]:
    """Return the texts in this message's content. Raises InvalidTextError."""
    content = message.get("content")
    if content is None:  # an assistant message with only tool calls: many templates require a string
        return [""]
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        kind = type(content).__name__
        fault = f"expected content to be a string or a list of parts, got {kind} in message {index}; send a string"
        raise InvalidTextError(fault, code="invalid_content")
    return [_text_of(part, index) for part in content]


def _text_of(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        message = f"expected message parts of type 'text', got {kind!r} in message {index}; leave it out"
        raise InvalidTextError(message, code="unsupported_message_part")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    """Parse the arguments of a call: the API has them as a JSON string, templates serialize them themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = read_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def read_arguments(arguments: object) -> object:
    """Return the parsed arguments of a call; unchanged if they are not valid JSON or have too many lists. Arguments
    that are missing or blank are an empty object: some clients drop it."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str) or has_too_many_lists(arguments):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
