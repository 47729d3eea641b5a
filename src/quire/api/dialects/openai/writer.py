"""What both endpoints of the OpenAI API put around their choices: the head of every object, usage, a stream's end.

    data: {"id": …, "object": …, "created": …, "model": …, "choices": [ a choice ], "usage": null}
    …
    data: [DONE]

An endpoint makes choices out of pieces. All chunks of a response begin with the same bytes, and most end with the same,
so those are made once.
"""

from collections.abc import Sequence
from time import time
from typing import Any, ClassVar

import msgspec

from quire.api.dialects.openai.error_body import DONE, error_event
from quire.api.dialects.openai.schemas import SamplingFields
from quire.api.http import sse
from quire.api.http.errors import ApiError
from quire.api.http.ids import new_id
from quire.api.prefix.explanation_json import part_body
from quire.client.reply.reply import Reply

ENCODER = msgspec.json.Encoder()
FINISH: dict[str | None, str] = {"deadline": "length", "cancelled": "stop"}
"""Our finish reasons in the API's terms; all others are called the same."""


class OpenAIWriter:
    """The frame of one response. A subclass names its objects, and makes its choices."""

    content_type = b"application/json"
    stream_headers = sse.HEADERS
    keep_alive = sse.COMMENT
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, model: str, fields: SamplingFields) -> None:
        options = fields.stream_options
        self._reports_misses = bool(fields.cache_explain)
        self.with_usage = bool(options and options.include_usage)
        """Usage is the last chunk."""
        self.with_usage_always = self.with_usage and bool(options and options.continuous_usage_stats)
        """Usage is in every chunk."""
        self.answer_id = new_id(self.id_prefix)
        self._head = {"id": self.answer_id, "object": self.object_name, "created": int(time()), "model": model}
        head = ENCODER.encode(self._head | {"object": self.chunk_name})
        self.before = b"data: " + head[:-1] + b',"choices":['
        """What a chunk has before its choice."""
        self.after = b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"
        """What it has after it, unless usage is in every chunk."""

    def begin(self, replies: Sequence[Reply]) -> bytes:
        """Nothing: a stream is its chunks."""
        return b""

    def end(self, replies: Sequence[Reply]) -> bytes:
        """Usage, where it was requested, and the last event."""
        return self.before + self.after_with_usage(replies) + DONE if self.with_usage else DONE

    def error(self, error: ApiError) -> bytes:
        """An error event, and the last event."""
        return error_event(error)

    def after_with_usage(self, replies: Sequence[Reply]) -> bytes:
        """What a chunk with usage has after its choice."""
        return b'],"usage":' + ENCODER.encode(self.usage(replies)) + b"}\n\n"

    def response(self, replies: Sequence[Reply], choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
        """A whole answer."""
        return ENCODER.encode({**self._head, "choices": choices, "usage": self.usage(replies), **more})

    def usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Usage so far."""
        num_prompt = sum(len(reply.request.prompt) for reply in replies)
        num_output = sum(reply.num_tokens for reply in replies)
        details: dict[str, Any] = {"cached_tokens": sum(reply.num_cached_tokens for reply in replies)}
        if self._reports_misses:
            details["cache_misses"] = [_cache_miss(reply) for reply in replies]
        counts: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": details,
        }
        beside: dict[str, int] = {}
        if num_thoughts := sum(reply.num_reasoning_tokens for reply in replies):
            beside["reasoning_tokens"] = num_thoughts
        if num_moves := sum(reply.num_inexact_moves for reply in replies):
            beside["inexact_moves"] = num_moves
        return {**counts, "completion_tokens_details": beside} if beside else counts


def _cache_miss(reply: Reply) -> dict[str, Any] | None:
    """Why the next token was not found when the request was admitted; None before that is known."""
    if reply.reuse is None:
        return None
    found = reply.reuse.explanation
    return {
        "cached_tokens": found.num_cached_tokens,
        "reason": found.reason,
        "position": found.position,
        "part": part_body(reply.reuse.part),
        "lost_tokens": reply.reuse.num_lost_tokens,
    }
