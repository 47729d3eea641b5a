"""Conversations that the server stores. `thread` in a body creates one, or continues one by the id of its last message.

Later bodies may omit the system text and the tools that the first body had. A client whose thread is not found resends
the whole conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.api.dialects.anthropic.error_body import THREAD_NOT_FOUND, THREAD_UNSUPPORTED
from quire.api.dialects.anthropic.schemas import CountFields
from quire.api.dialects.anthropic.turns import known_tools
from quire.api.http.errors import ApiError, invalid, shortened

Fields = TypeVar("Fields", bound=CountFields)


def fill_from_thread(fields: Fields, thread: KeptConversation) -> Fields:
    """Return the body with its missing fields filled from the thread."""
    missing = {name: value for name, value in thread.fields.items() if getattr(fields, name) is None}
    return fields.model_copy(update=missing) if missing else fields


def check_thread(fields: CountFields, store: ConversationStore | None) -> None:
    """Raise ApiError if `thread` is invalid, or if this server has no conversation store."""
    kind = _kind(fields)
    if kind is None:
        return
    if kind not in ("create", "continue"):
        raise invalid("expected create or continue as thread.type", "thread", "invalid_parameter")
    if store is None:
        message = "this server stores no conversations; send all messages, or start it with --store"
        raise ApiError(400, THREAD_UNSUPPORTED, message, "thread")


def thread_of(fields: CountFields, store: ConversationStore | None, tenant: str) -> KeptConversation | None:
    """Return the thread that a body creates or continues, without the body's messages; None: no thread."""
    kind = _kind(fields)
    if kind is None or store is None:
        return None
    if kind == "create":
        stored: dict[str, Any] = {} if fields.system is None else {"system": _system(fields.system)}
        if fields.tools is not None:
            stored["tools"] = known_tools(fields.tools)
        return KeptConversation([], stored)
    previous_id = (fields.thread or {}).get("previous_message_id")
    thread = store.find(tenant, previous_id) if isinstance(previous_id, str) else None
    if thread is None:
        message = f"no thread with message {shortened(previous_id)}; send all messages and begin another thread"
        raise ApiError(404, THREAD_NOT_FOUND, message, "thread")
    return thread


def _system(system: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the parts of a system text that the server reads; a copy is stored with each message of the thread."""
    if isinstance(system, str):
        return system
    return [{"type": block.get("type"), "text": block.get("text")} for block in system]


def _kind(fields: CountFields) -> Any:
    kind = (fields.thread or {}).get("type")
    return None if kind == "none" else kind
