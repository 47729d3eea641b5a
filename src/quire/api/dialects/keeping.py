"""A conversation and its answer to the store, in the form that all dialects share."""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from quire.api.conversation_store import ConversationStore, KeptConversation
from quire.client.outputs import Answer, ToolCall
from quire.client.reply import Reply

LOG = logging.getLogger("quire.api")


def keeping(
    store: ConversationStore,
    tenant: str,
    answer_id: str,
    said: KeptConversation,
    answered: Callable[[Answer], Sequence[dict[str, Any]]],
    told: Callable[[Reply], dict[str, Any]] | None = None,
) -> Callable[[Sequence[Reply]], None]:
    """What keeps a conversation under the id of its answer, once that is there; with the answer as it is `told`, where
    it is to be read back.

    `answered` are the messages that a client would send back of an answer: who goes on by an id must find the same
    conversation as who sends all of it.
    """

    def keep(replies: Sequence[Reply]) -> None:
        (reply,) = replies
        (answer,) = reply.completion().answers
        try:
            messages = [*said.messages, *answered(answer)]
            kept = KeptConversation(messages, said.fields, {} if told is None else told(reply))
            store.keep(tenant, answer_id, kept)
        except sqlite3.Error:  # the answer is good; going on with it will be refused
            LOG.exception("conversation %s could not be kept", answer_id)

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
