"""Normalizes the variants in which clients write conversations, before the chat template is applied. Pure.

    role developer                     ─► system, unless the template supports developer
    several system messages first      ─► one system message
    system message at a later position ─► unchanged if the template shows it, else a user message
    reasoning, thinking                ─► reasoning_content, plus thinking for templates that read it (gpt-oss)
    tool call ids                      ─► short ids if the template requires them

The module `messages` normalizes message contents and call arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from quire.text.parsers.tool_format import ID_CHARS

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Field names that clients use for an assistant's reasoning; of several, the first is used."""
SHORT_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_CHARS}}}")


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """The variants of messages that one chat template supports or needs."""

    has_developer: bool = False  # the role developer
    has_late_system: bool = True  # system messages after other messages
    needs_short_ids: bool = False


DEFAULT_SUPPORT = TemplateSupport()


def canonical(messages: Sequence[Mapping[str, Any]], support: TemplateSupport) -> list[Any]:
    """Return the conversation in the form that the template supports. If an item is not a mapping, the list is returned
    unchanged, and a later step rejects the item."""
    if not all(isinstance(message, Mapping) for message in messages):
        return list(messages)
    result = [_message(message, support) for message in messages]
    num_system = next((index for index, message in enumerate(result) if message.get("role") != "system"), len(result))
    leading = result[:num_system]
    if len(leading) > 1 and all(isinstance(message.get("content"), str) for message in leading):
        result[:num_system] = [{**leading[0], "content": "\n\n".join(message["content"] for message in leading)}]
        num_system = 1
    if support.has_late_system:
        return result
    return result[:num_system] + [_as_user(message) for message in result[num_system:]]


def _message(message: Mapping[str, Any], support: TemplateSupport) -> dict[str, Any]:
    result = dict(message)
    if result.get("role") == "developer" and not support.has_developer:
        result["role"] = "system"
    reasoning = next((result[key] for key in REASONING_FIELDS if result.get(key) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    if support.needs_short_ids:
        if isinstance(result.get("tool_call_id"), str):
            result["tool_call_id"] = short_id(result["tool_call_id"])
        if isinstance(result.get("tool_calls"), list):
            result["tool_calls"] = [_short_call(call) for call in result["tool_calls"]]
    return result


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message.get("role") == "system" else message


def _short_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("id"), str):
        return call
    return {**call, "id": short_id(call["id"])}


def short_id(call_id: str) -> str:
    """Return an id of `ID_CHARS` letters and digits: the id itself if it has that form, else a prefix of its hash."""
    return (
        call_id
        if SHORT_ID.fullmatch(call_id)
        else blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:ID_CHARS]
    )
