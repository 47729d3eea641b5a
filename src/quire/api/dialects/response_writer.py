"""The base class of response writers, which encode a reply's pieces (output as it arrives) as the bytes of an API. Also
converts an answer to a message of the continued conversation, in the internal form that all dialects share."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.api.http import sse
from quire.api.http.errors import ApiError
from quire.client.reply.loops import LOOP
from quire.client.reply.outputs import Answer, Piece, ToolCall
from quire.client.reply.reply import Reply
from quire.client.request.text_model import TextModel

ENCODER = msgspec.json.Encoder()
PieceBatch = Sequence[tuple[int, Piece]]
"""Pieces that arrived together, each with the index of its prompt."""
ProgressFields = Mapping[str, Any]
"""The fields of `prompt_progress`, named as llama-server names them."""


class ResponseWriter:
    """Writes the response to one request. Each request has its own writer, which may keep state.

    `replies` has one entry per prompt, with its answers so far. Long output is encoded in a worker thread, one call at
    a time.
    """

    answer_id = ""
    """The id of the response; empty if the API has none."""
    content_type = sse.JSON
    """The content type of a complete (not streamed) response."""
    stream_headers: Sequence[tuple[bytes, bytes]] = sse.HEADERS
    """The headers of a stream, including its content type."""

    def prepare(self, fields: Any, text: TextModel) -> None:
        """Called once before the first reply, in a worker thread. The model may have been loaded only after `begin`."""

    def begin(self, replies: Sequence[Reply]) -> bytes:
        """Return a stream's first bytes. `replies` is empty if the stream is opened before the prompts are known."""
        return b""

    def keep_alive(self, progress: ProgressFields | None) -> bytes:
        """Return an event without content, sent while a stream waits, so that neither client nor proxy closes it. It
        must be one that the API's clients count as a sign of life, and has the prompt's progress if requested."""
        raise NotImplementedError

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """Return the bytes that these pieces add to a stream; may be empty. Called once per batch."""
        raise NotImplementedError

    def end(self, replies: Sequence[Reply]) -> bytes:
        """Return the last bytes of a complete stream, with usage if requested."""
        raise NotImplementedError

    def error(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that failed after it was opened."""
        raise NotImplementedError

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """Return the complete response with all answers and usage."""
        raise NotImplementedError

    # -- for responses whose conversation is stored ----------------------------------------------------------------

    def history_messages(self, answer: Answer) -> list[dict[str, Any]]:
        """Return an answer as the messages that a client would resend: a conversation continued by id must equal one
        that is resent as a whole."""
        return [answer_message(answer, answer.tool_calls)]

    def retrievable(self, reply: Reply) -> dict[str, Any]:
        """Return the complete response, if clients of this API can retrieve it later; else an empty object."""
        return {}

    def on_not_stored(self) -> None:
        """Called when the conversation could not be written: the response is complete, but cannot be continued."""


def progress_fields(replies: Sequence[Reply]) -> ProgressFields | None:
    """Return the progress of all prompts of a request together; None: they are not known yet."""
    rows = [reply.progress for reply in replies]
    if not rows:
        return None
    estimates = [row.left_s for row in rows if row.left_s is not None]
    return {
        "total": sum(row.num_prompt_tokens for row in rows),
        "cache": sum(row.num_cached_tokens for row in rows),
        "processed": sum(row.num_processed_tokens for row in rows),
        "time_ms": round(1000 * max(row.elapsed_s for row in rows)),
        "left_ms": round(1000 * max(estimates)) if len(estimates) == len(rows) else None,
    }


def finish_detail(reason: str | None) -> dict[str, str]:
    """Return a field for a finish reason that the APIs have no name for; they report it as the maximum length."""
    return {"finish_detail": LOOP} if reason == LOOP else {}


def call_message(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as part of a chat message."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def answer_message(answer: Answer, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return an answer as a message of the continued conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [call_message(call) for call in calls]
    return message
