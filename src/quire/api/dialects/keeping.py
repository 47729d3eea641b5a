"""A conversation and its answer to the store, in the form that all dialects share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.client.reply.outputs import Answer, ToolCall
from quire.client.reply.reply import Reply


class KeptAnswer(Protocol):
    """An answer that says whether it is kept, and can be read back."""

    def finished(self, reply: Reply) -> dict[str, Any]:
        """As its client gets it in the end."""
        ...

    def not_kept(self) -> None:
        """The disk took no more: the answer is good, and going on with it will be refused."""
        ...


def keeping(
    store: ConversationStore,
    tenant: str,
    answer_id: str,
    said: KeptConversation,
    answered: Callable[[Answer], Sequence[dict[str, Any]]],
    writer: KeptAnswer | None = None,
) -> Callable[[Sequence[Reply]], None]:
    """What keeps a conversation under the id of its answer, once that is there; with the answer as its client gets it,
    where it is to be read back.

    `answered` are the messages that a client would send back of an answer: who goes on by an id must find the same
    conversation as who sends all of it.
    """

    def keep(replies: Sequence[Reply]) -> None:
        (reply,) = replies
        (answer,) = reply.completion().answers
        messages = [*said.messages, *answered(answer)]
        kept = KeptConversation(messages, said.fields, {} if writer is None else writer.finished(reply))
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
