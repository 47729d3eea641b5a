"""Responses in the format of `/v1/responses`: a response of output items, whole or as a stream of events.

    created · in_progress · (item added · parts and deltas · item done) … · completed

An item is reasoning, a message or a function call. A complete item is sent again whole, and the last event has all.
"""

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from quire.api.dialects.openai.error_body import error_body
from quire.api.dialects.openai.schemas import CacheOptionsFields, ResponseFields
from quire.api.dialects.response_writer import ENCODER, PieceBatch, ProgressFields, ResponseWriter, finish_detail
from quire.api.http.errors import ApiError
from quire.api.prefix.explanation_json import miss_body
from quire.client.prefix.prompt_comparison import ComparisonResult
from quire.client.reply.loops import LOOP
from quire.client.reply.outputs import Answer, Part, Piece, ReasoningPart, TextPart, merge_pieces
from quire.client.reply.reply import Reply

INCOMPLETE_REASONS = ("length", "deadline", LOOP)
MISS_REASONS = {
    ComparisonResult.MODEL: "model_changed",
    ComparisonResult.SYSTEM: "input_changed",
    ComparisonResult.TOOLS: "tools_changed",
    ComparisonResult.MESSAGES: "input_changed",
    ComparisonResult.INPUT: "input_changed",
    ComparisonResult.EFFORT: "reasoning_effort_changed",
}
"""Results of comparing prompts, mapped to the API's reasons for a miss."""
NO_MISS = {ComparisonResult.HIT: "cache_hit", ComparisonResult.NOT_FOUND: "comparison_response_not_found"}
"""Other results; any that is in neither table becomes unavailable."""


class ItemsWriter(ResponseWriter):
    """The writer of one response."""

    def __init__(self, model: str, fields: ResponseFields, is_stored: bool = False) -> None:
        self.answer_id = "resp_" + uuid4().hex
        self._head = _head(model, fields) | {"id": self.answer_id, "store": is_stored}
        self._items = _Items(self.answer_id)
        self._num_events = 2
        """Sequence number of the next event. Numbers 0 and 1 belong to the events that `begin` encodes."""

    def on_not_stored(self) -> None:
        self._head["store"] = False

    def history_messages(self, answer: Answer) -> list[dict[str, Any]]:
        """Return no message for an answer without output, otherwise the usual ones."""
        return super().history_messages(answer) if answer.text or answer.reasoning or answer.tool_calls else []

    def begin(self, replies: Sequence[Reply]) -> bytes:
        response = self._response("in_progress", [], None)
        return _event("created", 0, {"response": response}) + _event("in_progress", 1, {"response": response})

    def keep_alive(self, progress: ProgressFields | None) -> bytes:
        """Return `in_progress` once more, with the number of the last event: it adds nothing to the response, and a
        client that reads on after this number misses nothing."""
        fields = {"response": self._response("in_progress", self._items.done, None)}
        extra = {} if progress is None else {"prompt_progress": progress}
        return _event("in_progress", self._num_events - 1, {**fields, **extra})

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        events = [event for _, piece in batch for event in self._items.add(piece)]
        return b"".join([self._next_event(name, fields) for name, fields in events])

    def end(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        data = b"".join([self._next_event(name, fields) for name, fields in self._items.close()])
        response = self._finished(reply, self._items.done)
        return data + self._next_event(response["status"], {"response": response})

    def error(self, error: ApiError) -> bytes:
        details = msgspec.json.decode(error_body(error))["error"]
        failure = {"code": "server_error" if error.status >= 500 else details["code"], "message": details["message"]}
        response = {**self._response("failed", self._items.done, None), "error": failure}
        return self._next_event("failed", {"response": response})

    def whole(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        return ENCODER.encode(self.retrievable(reply))

    def retrievable(self, reply: Reply) -> dict[str, Any]:
        items = _Items(self.answer_id)
        for piece in merge_pieces(reply.pieces):
            items.add(piece)
        items.close()
        return self._finished(reply, items.done)

    def _finished(self, reply: Reply, output: list[dict[str, Any]]) -> dict[str, Any]:
        reason = reply.pieces[-1].finish_reason if reply.pieces else None
        is_cut = reason in INCOMPLETE_REASONS
        response = self._response("incomplete" if is_cut else "completed", output, _usage(reply))
        response["prompt_cache_diagnostics"] = _diagnostics(reply)
        details = {"reason": "max_output_tokens", **finish_detail(reason)}
        return {**response, "incomplete_details": details} if is_cut else response

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "usage": usage}

    def _next_event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._num_events += 1
        return _event(name, self._num_events - 1, fields)


ItemEvent = tuple[str, dict[str, Any]]
"""An event's name and fields."""


class _Items:
    """Collects the output items of one response. Equal pieces produce equal items, including their ids."""

    def __init__(self, response_id: str) -> None:
        self._id_suffix = response_id.removeprefix("resp_")[:20]
        self.done: list[dict[str, Any]] = []
        self._part: Part | None = None
        """The kind of the currently open item."""
        self._id = ""
        self._text: list[str] = []

    def add(self, piece: Piece) -> list[ItemEvent]:
        is_call = not isinstance(piece.part, TextPart | ReasoningPart)
        events = list[ItemEvent]()
        if piece.part != self._part:
            if not piece.delta and not is_call:
                return events
            events += [*self.close(), *self._open(piece.part)]
        if piece.delta:
            self._text.append(piece.delta)
            events.append((_delta_name(piece.part), {**self._item_ref, **self._part_ref, "delta": piece.delta}))
        return events

    def close(self) -> list[ItemEvent]:
        if self._part is None:
            return []
        text, part = "".join(self._text), self._part
        item = _item(part, self._id, text, "completed")
        events = list[ItemEvent]()
        match part:
            case TextPart():
                events.append(("output_text.done", {**self._item_ref, **self._part_ref, "text": text, "logprobs": []}))
                events.append(("content_part.done", {**self._item_ref, **self._part_ref, "part": item["content"][0]}))
            case ReasoningPart():
                events.append(("reasoning_text.done", {**self._item_ref, **self._part_ref, "text": text}))
            case call:
                function = {"name": call.name, "arguments": text}
                events.append(("function_call_arguments.done", {**self._item_ref, **function}))
        events.append(("output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._part = None
        return events

    def _open(self, part: Part) -> list[ItemEvent]:
        self._part, self._text = part, []
        self._id = f"{_prefix(part)}{self._id_suffix}{len(self.done):04x}"
        item = _item(part, self._id, "", "in_progress")
        events: list[ItemEvent] = [("output_item.added", {"output_index": len(self.done), "item": item})]
        if isinstance(part, TextPart):
            events.append(("content_part.added", {**self._item_ref, **self._part_ref, "part": _output_text("")}))
        return events

    @property
    def _item_ref(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done)}

    @property
    def _part_ref(self) -> dict[str, int]:
        return {"content_index": 0} if isinstance(self._part, TextPart | ReasoningPart) else {}


def _event(name: str, number: int, fields: dict[str, Any]) -> bytes:
    kind = f"response.{name}"
    body = {"type": kind, "sequence_number": number, **fields}
    return b"event: " + kind.encode() + b"\ndata: " + ENCODER.encode(body) + b"\n\n"


def _prefix(part: Part) -> str:
    match part:
        case TextPart():
            return "msg_"
        case ReasoningPart():
            return "rs_"
        case _:
            return "fc_"


def _delta_name(part: Part) -> str:
    match part:
        case TextPart():
            return "output_text.delta"
        case ReasoningPart():
            return "reasoning_text.delta"
        case _:
            return "function_call_arguments.delta"


def _item(part: Part, item_id: str, text: str, status: str) -> dict[str, Any]:
    match part:
        case TextPart():
            content = [_output_text(text)] if status == "completed" else []
            return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        case ReasoningPart():
            content = [{"type": "reasoning_text", "text": text}] if text else []
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        case call:
            call_fields = {"call_id": call.call_id, "name": call.name, "arguments": text}
            return {"id": item_id, "type": "function_call", "status": status, **call_fields}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(reply: Reply) -> dict[str, Any]:
    num_prompt, num_output = len(reply.request.prompt), reply.num_tokens
    inexact = {"inexact_moves": reply.num_inexact_moves} if reply.num_inexact_moves else {}
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": reply.num_cached_tokens,
            "cache_write_tokens": reply.num_written_tokens,
            **({"pinned_tokens": reply.num_pinned_tokens} if reply.request.pins else {}),
        },
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reply.num_reasoning_tokens, **inexact},
        "total_tokens": num_prompt + num_output,
    }


def _diagnostics(reply: Reply) -> dict[str, Any] | None:
    """Return the comparison with an earlier response's prompt; null if the client requested none."""
    comparison = reply.comparison
    if comparison is None:
        return None
    if (reason := MISS_REASONS.get(comparison.verdict)) is None:
        result: dict[str, Any] = {"type": NO_MISS.get(comparison.verdict, "unavailable")}
    else:
        result = {"type": "cache_miss", "reason": reason, "cache_missed_tokens": comparison.num_missed_tokens}
        result["comparison_reusable_tokens"] = comparison.num_common_tokens
    return result if comparison.verdict is ComparisonResult.HIT else result | {"cache_explain": miss_body(reply.reuse)}


def _cache_options(options: CacheOptionsFields | None) -> dict[str, Any] | None:
    if options is None:
        return None
    return {
        "mode": options.mode or "implicit",
        "ttl": options.ttl or "30m",
        "comparison_response_id": options.comparison_response_id,
    }


def _head(model: str, fields: ResponseFields) -> dict[str, Any]:
    return {
        "object": "response",
        "created_at": int(time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_diagnostics": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_options": _cache_options(fields.prompt_cache_options),
        "prompt_cache_retention": fields.prompt_cache_retention,
        "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        "temperature": fields.temperature,
        "text": fields.text or {"format": {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": fields.top_p,
        "truncation": "disabled",
    }
