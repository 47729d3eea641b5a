"""Puts a conversation and its answer into the store, in the form that all dialects share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.client.reply.outputs import Answer, ToolCall
from quire.client.reply.reply import Reply


class KeptAnswer(Protocol):
    """A response that reports whether it is stored, and can be read back."""

    def finished(self, reply: Reply) -> dict[str, Any]:
        """The response as its client gets it in the end."""

    def not_kept(self) -> None:
        """The disk is full: the response is complete, but cannot be continued."""


def keeping(
    store: ConversationStore,
    tenant: str,
    answer_id: str,
    conversation: KeptConversation,
    to_messages: Callable[[Answer], Sequence[dict[str, Any]]],
    writer: KeptAnswer | None = None,
) -> Callable[[Sequence[Reply]], None]:
    """A function that stores a conversation under the id of its answer, once that is complete; with the response as
    its client gets it, where it is to be read back.

    `to_messages` returns the messages that a client would send back of an answer: a client that continues by an id must
    get the same conversation as one that sends all of it.
    """

    def keep(replies: Sequence[Reply]) -> None:
        (reply,) = replies
        (answer,) = reply.completion().answers
        messages = [*conversation.messages, *to_messages(answer)]
        kept = KeptConversation(messages, conversation.fields, {} if writer is None else writer.finished(reply))
        if not store.keep(tenant, answer_id, kept) and writer is not None:
            writer.not_kept()

    return keep


def call_message(call: ToolCall) -> dict[str, Any]:
    """A call in a message."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def answer_message(answer: Answer, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An answer as a message of the conversation that goes on behind it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [call_message(call) for call in calls]
    return message
