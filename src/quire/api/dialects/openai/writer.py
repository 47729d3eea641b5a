"""The base of the chat and completion writers: the common fields of each object, usage, and the end of a stream.

    data: {"id": …, "object": …, "created": …, "model": …, "choices": [ a choice ], "usage": null}
    …
    data: [DONE]

Subclasses convert pieces to choices. All chunks of a response begin with the same bytes, and most end with the same, so
those are encoded once.
"""

from collections.abc import Sequence
from time import time
from typing import Any, ClassVar
from uuid import uuid4

from quire.api.dialects.openai.error_body import DONE, error_event
from quire.api.dialects.openai.schemas import SamplingFields
from quire.api.dialects.response_writer import ENCODER, ProgressFields, ResponseWriter, finish_detail
from quire.api.http.errors import ApiError
from quire.api.prefix.explanation_json import miss_body
from quire.client.reply.loops import LOOP
from quire.client.reply.outputs import Answer, Piece
from quire.client.reply.reply import Reply

FINISH: dict[str | None, str] = {"deadline": "length", "cancelled": "stop", LOOP: "length"}
"""Finish reasons of the engine, mapped to the API's; any other has the same name in both."""


def finish_fields(output: Piece | Answer) -> dict[str, Any]:
    """Return the fields of a choice about the end of its answer."""
    reason = output.finish_reason
    fields: dict[str, Any] = {"finish_reason": FINISH.get(reason, reason)}
    if reason:
        fields["stop_reason"] = output.stop_reason
    return {**fields, **finish_detail(reason)}


class OpenAIWriter(ResponseWriter):
    """Adds the fields that all objects have. A subclass defines the object names and converts pieces to choices."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    empty_choice: ClassVar[dict[str, Any]]
    """A choice of a chunk that adds nothing."""

    def __init__(self, model: str, fields: SamplingFields) -> None:
        options = fields.stream_options
        self._reports_misses = bool(fields.cache_explain)
        self._with_usage = bool(options and options.include_usage)
        """Whether the last chunk has usage."""
        self._with_usage_always = self._with_usage and bool(options and options.continuous_usage_stats)
        """Whether every chunk has usage."""
        self.answer_id = f"{self.id_prefix}-{uuid4().hex}"
        self._head = {"id": self.answer_id, "object": self.object_name, "created": int(time()), "model": model}
        head = ENCODER.encode(self._head | {"object": self.chunk_name})
        self._before = b"data: " + head[:-1] + b',"choices":['
        """A chunk's bytes before its choice."""
        self._after = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        """A chunk's bytes after its choice, unless every chunk has usage."""

    def keep_alive(self, progress: ProgressFields | None) -> bytes:
        """Return a chunk that adds nothing: some clients do not count comments as a sign of life (ADR 0054)."""
        data = self._before + ENCODER.encode(self.empty_choice) + self._after
        if progress is None:
            return data
        return data.removesuffix(b"}\n\n") + b',"prompt_progress":' + ENCODER.encode(progress) + b"}\n\n"

    def end(self, replies: Sequence[Reply]) -> bytes:
        """Return the usage chunk, if requested, and the last event."""
        return self._before + self._after_with_usage(replies) + DONE if self._with_usage else DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def chunks(self, replies: Sequence[Reply], choices: Sequence[dict[str, Any]]) -> bytes:
        """Return a chunk for each choice."""
        after = self._after_with_usage(replies) if self._with_usage_always else self._after
        return b"".join([self._before + ENCODER.encode(choice) + after for choice in choices])

    def _after_with_usage(self, replies: Sequence[Reply]) -> bytes:
        """Return the bytes after the choice of a chunk with usage."""
        return b'],"usage":' + ENCODER.encode(self.usage(replies)) + b"}\n\n"

    def response(self, replies: Sequence[Reply], choices: Sequence[dict[str, Any]], **extra: Any) -> bytes:
        """Encode a complete response."""
        return ENCODER.encode({**self._head, "choices": choices, "usage": self.usage(replies), **extra})

    def usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the token counts so far."""
        num_prompt = sum(len(reply.request.prompt) for reply in replies)
        num_output = sum(reply.num_tokens for reply in replies)
        details: dict[str, Any] = {
            "cached_tokens": sum(reply.num_cached_tokens for reply in replies),
            "cache_write_tokens": sum(reply.num_written_tokens for reply in replies),
        }
        if self._reports_misses:
            details["cache_misses"] = [miss_body(reply.reuse) for reply in replies]
        counts: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": details,
        }
        output_details: dict[str, int] = {}
        if num_reasoning := sum(reply.num_reasoning_tokens for reply in replies):
            output_details["reasoning_tokens"] = num_reasoning
        if num_moves := sum(reply.num_inexact_moves for reply in replies):
            output_details["inexact_moves"] = num_moves
        return {**counts, "completion_tokens_details": output_details} if output_details else counts
