"""Compaction: the model writes a summary, with which a client replaces the conversation so far.

    /v1/responses/compact                ─► the user's messages, then a compaction item
    /v1/responses … compaction_trigger   ─► a compaction item

The summary is in the item's `encrypted_content`: as text behind a prefix, because it is a client's own conversation. A
client resends the item, and the model reads the summary as a user message.
"""

from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ResponseFields
from quire.api.dialects.response_writer import ENCODER, PieceBatch
from quire.api.http.errors import invalid
from quire.client.reply.outputs import Answer
from quire.client.reply.reply import Reply

TRIGGER = "compaction_trigger"
PREFIX = "quire-summary:"
"""Begins `encrypted_content`; the content of other services cannot be read here."""
HEADING = "This is a summary of the conversation before this message:\n\n"
SUMMARY_REQUEST = (
    "Write a summary of this conversation, from which its work can be continued without the conversation itself: the "
    "task and the user's wishes, what was done and found, with names of files, commands and values, and what is left "
    "to do. Write only the summary, as text; call no tools."
)
MAX_SUMMARY_TOKENS = 4096


def is_triggered(fields: ResponseFields) -> bool:
    """Return whether the input ends with a compaction trigger."""
    return not isinstance(fields.input, str) and bool(fields.input) and fields.input[-1].get("type") == TRIGGER


def summary_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of a compaction item. Raises ApiError for an item of another service."""
    content = item.get("encrypted_content")
    if not isinstance(content, str) or not content.startswith(PREFIX):
        message = "expected a compaction item from /v1/responses/compact of quire; leave it out, and send its messages"
        raise invalid(message, "input", "invalid_parameter")
    return {"role": "user", "content": HEADING + content.removeprefix(PREFIX)}


def is_kept(message: Mapping[str, Any]) -> bool:
    """Return whether a message is kept beside the summary: the user's are, but not those of earlier summaries."""
    return message.get("role") == "user" and not str(message.get("content")).startswith(HEADING)


class CompactionWriter(ItemsWriter):
    """The writer of a response that is a compaction item."""

    _is_announced = False

    def history_messages(self, answer: Answer) -> list[dict[str, Any]]:
        return [{"role": "user", "content": HEADING + _summary(answer)}]

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """Report progress once per batch, without text."""
        progress = {"item_id": self._item_id, "output_index": 0}
        return self._announcement() + self._next_event("compaction.compacting", progress)

    def end(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        item = {"output_index": 0, "item": self._item_of(reply)}
        done = self._announcement() + self._next_event("output_item.done", item)
        response = self.retrievable(reply)
        return done + self._next_event(response["status"], {"response": response})

    def _announcement(self) -> bytes:
        """Return the item's first event, once."""
        if self._is_announced:
            return b""
        self._is_announced = True
        return self._next_event("output_item.added", {"output_index": 0, "item": self._item("")})

    def retrievable(self, reply: Reply) -> dict[str, Any]:
        return self._finished(reply, [self._item_of(reply)])

    @property
    def _item_id(self) -> str:
        return "cmp_" + self.answer_id.removeprefix("resp_")[:24]

    def _item(self, content: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "compaction", "encrypted_content": content}

    def _item_of(self, reply: Reply) -> dict[str, Any]:
        (answer,) = reply.completion().answers
        return self._item(PREFIX + _summary(answer))


class CompactedWriter(CompactionWriter):
    """The writer of `/v1/responses/compact`."""

    def __init__(self, model: str, fields: ResponseFields, kept: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(model, fields)
        self._kept = kept

    def whole(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        messages = [self._message(index, message["content"]) for index, message in enumerate(self._kept)]
        output = [*messages, self._item_of(reply)]
        compacted = {"id": self.answer_id, "object": "response.compaction", "created_at": int(time())}
        return ENCODER.encode({**compacted, "output": output, "usage": self.retrievable(reply)["usage"]})

    def _message(self, index: int, text: str) -> dict[str, Any]:
        message_id = f"msg_{self.answer_id.removeprefix('resp_')[:20]}{index:04x}"
        content = [{"type": "input_text", "text": text}]
        return {"id": message_id, "type": "message", "status": "completed", "role": "user", "content": content}


def _summary(answer: Answer) -> str:
    """Return the summary; a model that used up its tokens for reasoning has only that."""
    return answer.text.strip() or answer.reasoning.strip()
