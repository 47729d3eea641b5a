"""Conversations that the server stores: `thread` begins one, or continues one by the id of its last message.

Later bodies may omit the system text and the tools of the first. A client whose thread is not found sends all of its
messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.api.dialects.anthropic.error_body import THREAD_NOT_FOUND, THREAD_UNSUPPORTED
from quire.api.dialects.anthropic.schemas import CountFields
from quire.api.dialects.anthropic.turns import known_tools
from quire.api.dialects.anthropic.writer import valid_calls
from quire.api.dialects.keeping import answer_message, keeping
from quire.api.http.errors import ApiError, invalid, shortened
from quire.client.reply.outputs import Answer
from quire.client.reply.reply import Reply


@dataclass(frozen=True, slots=True)
class Thread:
    """A conversation before its new messages."""

    store: ConversationStore
    tenant: str
    stored: KeptConversation

    def keeping(self, answer_id: str, messages: Sequence[dict[str, Any]]) -> Callable[[Sequence[Reply]], None]:
        """A function that stores it with these messages and their answer."""
        whole = KeptConversation([*self.stored.messages, *messages], self.stored.fields)
        return keeping(self.store, self.tenant, answer_id, whole, _sent_back)

    def filled(self, fields: Any) -> Any:
        """A body with the fields that it omitted."""
        missing = {name: value for name, value in self.stored.fields.items() if getattr(fields, name) is None}
        return fields.model_copy(update=missing) if missing else fields


def _sent_back(answer: Answer) -> list[dict[str, Any]]:
    return [answer_message(answer, valid_calls(answer))]


def check_thread(fields: CountFields, store: ConversationStore | None) -> None:
    """Raise ApiError for a thread that no server, or not this one, could keep."""
    kind = _kind(fields)
    if kind is None:
        return
    if kind not in ("create", "continue"):
        raise invalid("expected create or continue as thread.type", "thread", "invalid_parameter")
    if store is None:
        message = "this server stores no conversations; send all messages, or start it with --store"
        raise ApiError(400, THREAD_UNSUPPORTED, message, "thread")


def thread_of(fields: CountFields, store: ConversationStore | None, tenant: str) -> Thread | None:
    """The conversation that a body begins or continues; None: it is not stored."""
    kind = _kind(fields)
    if kind is None or store is None:
        return None
    if kind == "create":
        began: dict[str, Any] = {} if fields.system is None else {"system": _system(fields.system)}
        if fields.tools is not None:
            began["tools"] = known_tools(fields.tools)
        return Thread(store, tenant, KeptConversation([], began))
    previous_id = (fields.thread or {}).get("previous_message_id")
    found = store.find(tenant, previous_id) if isinstance(previous_id, str) else None
    if found is None:
        message = f"no thread with message {shortened(previous_id)}; send all messages and begin another thread"
        raise ApiError(404, THREAD_NOT_FOUND, message, "thread")
    return Thread(store, tenant, found)


def _system(system: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """The part of it that is read: it is stored with each message of the thread."""
    if isinstance(system, str):
        return system
    return [{"type": one.get("type"), "text": one.get("text")} for one in system]


def _kind(fields: CountFields) -> Any:
    kind = (fields.thread or {}).get("type")
    return None if kind == "none" else kind
