"""Responses in the format of the Anthropic API: a message of content blocks, either whole or as a stream of events.

    message_start · (content_block_start · content_block_delta … · content_block_stop) … · message_delta · message_stop

Every event has a line with its name, which clients read.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec

from quire.api.dialects.anthropic.error_body import error_event
from quire.api.dialects.response_writer import (
    ENCODER,
    PieceBatch,
    ProgressFields,
    ResponseWriter,
    answer_message,
    finish_detail,
)
from quire.api.http.errors import ApiError
from quire.api.prefix.explanation_json import miss_body
from quire.client.prefix.prompt_comparison import ComparisonResult
from quire.client.reply.loops import LOOP
from quire.client.reply.outputs import Answer, Part, Piece, ReasoningPart, TextPart, ToolCall
from quire.client.reply.reply import Reply

STOP_REASONS = {"length": "max_tokens", "deadline": "max_tokens", LOOP: "max_tokens", "tool_calls": "tool_use"}
"""Finish reasons of the engine, mapped to the API's; any other becomes end_turn."""
NO_USAGE = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
"""Usage while the prompt is not known yet; the message's last events have the true counts."""
MISS_REASONS = {
    ComparisonResult.NOT_FOUND: "previous_message_not_found",
    ComparisonResult.MODEL: "model_changed",
    ComparisonResult.SYSTEM: "system_changed",
    ComparisonResult.TOOLS: "tools_changed",
    ComparisonResult.MESSAGES: "messages_changed",
}
"""Results of comparing prompts, mapped to the API's reasons; any other becomes unavailable."""
NO_TOKENS = ("previous_message_not_found", "unavailable")
"""Reasons without a number of tokens."""


class MessagesWriter(ResponseWriter):
    """The writer of one message."""

    def __init__(self, model: str, is_compared: bool = False) -> None:
        """`is_compared`: the client names an earlier message, with whose prompt this one is compared."""
        self._model = model
        self._is_compared = is_compared
        self._has_diagnosis = False
        """Whether the message's first event had the result of the comparison."""
        self.answer_id = "msg_" + uuid4().hex[:24]
        self._part: Part | None = None
        """The part (text, reasoning or a tool call) of the open content block; None: no block is open."""
        self._num_blocks = 0

    def begin(self, replies: Sequence[Reply]) -> bytes:
        reply = replies[0] if replies else None
        counts = NO_USAGE if reply is None else usage(reply)
        message = self._message([]) | {"diagnostics": self._diagnostics(reply), "usage": counts}
        self._has_diagnosis = reply is not None and reply.comparison is not None
        return _event({"type": "message_start", "message": message})

    def keep_alive(self, progress: ProgressFields | None) -> bytes:
        return _event({"type": "ping"} if progress is None else {"type": "ping", "prompt_progress": progress})

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        return b"".join([self._events_of(piece) for _, piece in batch])

    def end(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        delta = _stop_fields(reply.pieces[-1])
        event: dict[str, Any] = {"type": "message_delta", "delta": delta, "usage": usage(reply)}
        if self._is_compared and not self._has_diagnosis:
            event["diagnostics"] = self._diagnostics(reply)
        return self._close_block() + _event(event) + _event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        (answer,) = reply.completion().answers
        message = self._message(_blocks(answer)) | _stop_fields(answer)
        return ENCODER.encode(message | {"diagnostics": self._diagnostics(reply), "usage": usage(reply)})

    def _diagnostics(self, reply: Reply | None) -> dict[str, Any] | None:
        """Return the cause of a cache miss after a comparison; null without a miss, and a null reason while pending."""
        comparison = None if reply is None else reply.comparison
        if reply is None or comparison is None:
            return {"cache_miss_reason": None} if self._is_compared else None
        if comparison.verdict is ComparisonResult.HIT:
            return None
        reason: dict[str, Any] = {"type": MISS_REASONS.get(comparison.verdict, "unavailable")}
        if reason["type"] not in NO_TOKENS:
            reason["cache_missed_input_tokens"] = comparison.num_missed_tokens
        return {"cache_miss_reason": reason, "cache_explain": miss_body(reply.reuse)}

    def history_messages(self, answer: Answer) -> list[dict[str, Any]]:
        return [answer_message(answer, valid_calls(answer))]

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _events_of(self, piece: Piece) -> bytes:
        is_call = not isinstance(piece.part, TextPart | ReasoningPart)
        if not piece.delta and (not is_call or piece.part == self._part):
            return b""
        opened = b"" if piece.part == self._part else self._open_block(piece.part)
        if not piece.delta:
            return opened
        event = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": _delta(piece)}
        return opened + _event(event)

    def _open_block(self, part: Part) -> bytes:
        closed = self._close_block()
        self._part, self._num_blocks = part, self._num_blocks + 1
        block = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": _empty_block(part)}
        return closed + _event(block)

    def _close_block(self) -> bytes:
        if self._part is None:
            return b""
        self._part = None
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def usage(reply: Reply) -> dict[str, int]:
    """Return the usage so far. Prompt tokens that were cached before, or are cached now, are not in input_tokens."""
    num_written = reply.num_written_tokens
    return {
        "input_tokens": len(reply.request.prompt) - reply.num_cached_tokens - num_written,
        "cache_creation_input_tokens": num_written,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "output_tokens": reply.num_tokens,
        **({"cache_pinned_tokens": reply.num_pinned_tokens} if reply.request.pins else {}),
        **({"inexact_moves": reply.num_inexact_moves} if reply.num_inexact_moves else {}),
    }


def _event(event: dict[str, Any]) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + ENCODER.encode(event) + b"\n\n"


def _stop_fields(last: Piece | Answer) -> dict[str, Any]:
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    reason = STOP_REASONS.get(last.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None, **finish_detail(last.finish_reason)}


def _empty_block(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": ""}
        case ReasoningPart():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case call:
            return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.part:
        case TextPart():
            return {"type": "text_delta", "text": piece.delta}
        case ReasoningPart():
            return {"type": "thinking_delta", "thinking": piece.delta}
        case _:
            return {"type": "input_json_delta", "partial_json": piece.delta}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in valid_calls(answer):
        # The arguments are already encoded as JSON.
        arguments = msgspec.Raw(call.arguments.encode())
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments})
    return blocks


def valid_calls(answer: Answer) -> tuple[ToolCall, ...]:
    """Return an answer's tool calls. If the answer was cut off, incomplete arguments are replaced with an empty object,
    because half an object cannot be sent."""
    if answer.finish_reason == "tool_calls":
        return answer.tool_calls
    return tuple(call if _is_object(call.arguments) else replace(call, arguments="{}") for call in answer.tool_calls)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False
