"""Conversations that the server keeps: `thread` begins one, or goes on with one by the id of its last message.

What began it need not be told again: its system text and its tools. A client that is told that a thread is not there
sends all of its messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.api.dialects.anthropic.error_body import THREAD_NOT_FOUND, THREAD_UNSUPPORTED
from quire.api.dialects.anthropic.schemas import CountFields
from quire.api.dialects.anthropic.turns import known_tools
from quire.api.dialects.anthropic.writer import told_calls
from quire.api.dialects.keeping import answer_message, keeping
from quire.api.http.errors import ApiError, invalid, shortened
from quire.client.reply.outputs import Answer
from quire.client.reply.reply import Reply


@dataclass(frozen=True, slots=True)
class Thread:
    """What is known of a conversation before its new messages."""

    store: ConversationStore
    tenant: str
    said: KeptConversation

    def keeping(self, answer_id: str, messages: Sequence[dict[str, Any]]) -> Callable[[Sequence[Reply]], None]:
        """What keeps it with these messages and their answer."""
        whole = KeptConversation([*self.said.messages, *messages], self.said.fields)
        return keeping(self.store, self.tenant, answer_id, whole, _answered)

    def filled(self, fields: Any) -> Any:
        """A body with what it need not tell again."""
        missing = {name: value for name, value in self.said.fields.items() if getattr(fields, name) is None}
        return fields.model_copy(update=missing) if missing else fields


def _answered(answer: Answer) -> list[dict[str, Any]]:
    return [answer_message(answer, told_calls(answer))]


def check_thread(fields: CountFields, store: ConversationStore | None) -> None:
    """Raise ApiError for a thread that no server, or not this one, could keep."""
    kind = _kind(fields)
    if kind is None:
        return
    if kind not in ("create", "continue"):
        raise invalid("thread.type must be create or continue", "thread", "invalid_parameter")
    if store is None:
        message = "this server keeps no conversations; send all of its messages, or start it with --store"
        raise ApiError(400, THREAD_UNSUPPORTED, message, "thread")


def thread_of(fields: CountFields, store: ConversationStore | None, tenant: str) -> Thread | None:
    """The conversation that a body begins or goes on with; None: it is kept by nobody."""
    kind = _kind(fields)
    if kind is None or store is None:
        return None
    if kind == "create":
        began: dict[str, Any] = {} if fields.system is None else {"system": _system(fields.system)}
        if fields.tools is not None:
            began["tools"] = known_tools(fields.tools)
        return Thread(store, tenant, KeptConversation([], began))
    given = (fields.thread or {}).get("previous_message_id")
    found = store.find(tenant, given) if isinstance(given, str) else None
    if found is None:
        message = f"there is no thread with a message {shortened(given)}; send all messages and begin another"
        raise ApiError(404, THREAD_NOT_FOUND, message, "thread")
    return Thread(store, tenant, found)


def _system(given: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """What is read of it: each message of the thread carries it along."""
    return given if isinstance(given, str) else [{"type": one.get("type"), "text": one.get("text")} for one in given]


def _kind(fields: CountFields) -> Any:
    kind = (fields.thread or {}).get("type")
    return None if kind == "none" else kind
