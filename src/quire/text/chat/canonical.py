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

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Field names that clients use for an assistant's reasoning; of several, the first is used."""
SHORT_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The variants that one chat template supports."""

    knows_developer: bool = False
    shows_late_system: bool = True
    wants_short_ids: bool = False


ANY_SPELLING = Spelling()


def canonical(messages: Sequence[Mapping[str, Any]], spelling: Spelling) -> list[Any]:
    """Return the conversation in the form that the template supports. A list with an item that is not a mapping is
    returned unchanged; a later step rejects it."""
    if not all(isinstance(message, Mapping) for message in messages):
        return list(messages)
    result = [_message(message, spelling) for message in messages]
    num_first = next((at for at, message in enumerate(result) if message.get("role") != "system"), len(result))
    first = result[:num_first]
    if len(first) > 1 and all(isinstance(message.get("content"), str) for message in first):
        result[:num_first] = [{**first[0], "content": "\n\n".join(message["content"] for message in first)}]
        num_first = 1
    if spelling.shows_late_system:
        return result
    return result[:num_first] + [_as_user(message) for message in result[num_first:]]


def _message(message: Mapping[str, Any], spelling: Spelling) -> dict[str, Any]:
    made = dict(message)
    if made.get("role") == "developer" and not spelling.knows_developer:
        made["role"] = "system"
    thoughts = next((made[key] for key in THOUGHTS if made.get(key) is not None), None)
    if thoughts is not None:
        made = {"thinking": thoughts, **made, "reasoning_content": thoughts}
    if spelling.wants_short_ids:
        if isinstance(made.get("tool_call_id"), str):
            made["tool_call_id"] = short_id(made["tool_call_id"])
        if isinstance(made.get("tool_calls"), list):
            made["tool_calls"] = [_short_call(call) for call in made["tool_calls"]]
    return made


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
