"""One form of a conversation before its template: what clients spell in several ways is spelled in one. Pure.

    developer            ─► system, unless the template has a place for it
    several at the start ─► one system message
    system later on      ─► as it is where the template shows it, else a user's
    reasoning, thinking  ─► reasoning_content, and thinking for templates that read that (gpt-oss)
    ids of calls         ─► short ones where the template wants them short

Contents and arguments of calls are brought into one form where messages are prepared (`messages`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from quire.text.parsers.tool_format import ID_CHARS

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What clients call an assistant's thoughts; where several are given, the first counts."""
SHORT_ID = re.compile(rf"[a-zA-Z0-9]{{{ID_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Spelling:
    """What one template takes."""

    knows_developer: bool = False
    shows_late_system: bool = True
    wants_short_ids: bool = False


ANY_SPELLING = Spelling()


def canonical(messages: Sequence[Mapping[str, Any]], spelling: Spelling) -> list[Any]:
    """The same conversation in the template's own spelling. What is no message is left for others to refuse."""
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
    """An id of so many letters and digits: its own if it is one, else always the same for the same."""
    return (
        call_id
        if SHORT_ID.fullmatch(call_id)
        else blake2b(call_id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:ID_CHARS]
    )
