"""Parses the SSE stream of an OpenAI server into chunks of tokens. Pure logic, no I/O.

    data: {"choices": [{"index": 0, "text": " cat", "token_ids": [2836], "finish_reason": null}]}
    data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    data: [DONE]

Texts are ignored, because the gateway requests token ids; a server that does not send them cannot be a member. The
bytes of the stream may be split anywhere. Invalid data raises `MessageError` and no other exception.

Parsing runs on the gateway's event loop, so it takes linear time, and the size of an event is bounded. Only the first
event repeats the prompt, which is compared as bytes and removed before the JSON is parsed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import NoReturn

import msgspec

from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs
from quire.errors import RETRY_AFTER_S, MessageError, QueueFullError, QuireError, RequestError
from quire.http_client import SseReader

MAX_LINE_BYTES = 1 << 19
"""Maximum size of an event without its prompt; parsing takes at most 35 ms of CPU time."""
MAX_TOKEN_BYTES = 12
"""Maximum bytes per prompt token in the first event, which repeats the prompt."""
_PROMPT_IDS_FIELD = re.compile(rb'"prompt_token_ids"\s*:\s*\[')
MAX_SHOWN_CHARS = 300
"""Maximum characters kept of a server's error message."""
DONE = b"[DONE]"
TOKEN_ID = "token_id:"  # noqa: S105 - vLLM's prefix of token ids in place of texts
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Finish reasons of complete answers; any other reason means that the server aborted the answer."""
FULL_STATUSES, REJECTED_STATUSES = (429, 503), (401, 403, 404)
"""HTTP statuses that the request did not cause: the server is full, rejects the key, or does not have the model."""
MAX_RETRY_S = 600


@dataclass(frozen=True, slots=True)
class OpenAIFailure:
    """The server's error for an answer that it refused or aborted."""

    status: int
    """HTTP status; below 500 the request caused the error."""
    message: str


@dataclass(slots=True)
class OpenAIChunk:
    """The parsed content of some bytes of one answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token if log-probabilities were requested, otherwise empty."""
    reason: FinishReason | None = None
    """Finish reason, if the answer has ended."""
    num_cached_tokens: int | None = None
    failure: OpenAIFailure | None = None
    is_done: bool = False
    """Whether the server has ended the stream."""

    def parts(self, num_tokens: int) -> "Sequence[OpenAIChunk]":
        """Split into chunks of at most `num_tokens` tokens; the last one has all other fields."""
        if len(self.token_ids) <= num_tokens:
            return (self,)
        *starts, last_start = range(0, len(self.token_ids), num_tokens)
        chunks = [OpenAIChunk(self.token_ids[i : i + num_tokens], self.logprobs[i : i + num_tokens]) for i in starts]
        return (*chunks, replace(self, token_ids=self.token_ids[last_start:], logprobs=self.logprobs[last_start:]))


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _ErrorFields(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageFields | None = None
    error: _ErrorFields | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields | str | None = None
    message: str = ""
    detail: str | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class OpenAIStream:
    """The parser of one answer's stream."""

    def __init__(
        self, prompt: tuple[int, ...], vocabulary_size: int, num_alternatives: int | None, max_tokens: int
    ) -> None:
        self._prompt = prompt
        self._vocabulary_size = vocabulary_size
        self._num_alternatives = num_alternatives
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._events = SseReader(MAX_LINE_BYTES + MAX_TOKEN_BYTES * len(prompt))
        self._reason: FinishReason | None = None
        self._is_done = False

    def feed(self, data: bytes) -> OpenAIChunk:
        """Parse the events that are complete with these bytes. Raises MessageError."""
        output = OpenAIChunk()
        for event in self._events.feed(data):
            self._read(event.data.strip(), output)
        return output

    def _read(self, data: bytes, output: OpenAIChunk) -> None:
        if data == DONE:
            output.is_done = self._is_done = True
        if not data or self._is_done:
            return
        data = self._remove_prompt(data)
        try:
            chunk = _chunk_decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MessageError(f"expected a completion chunk, got {_excerpt(data)!r}: {error}") from error
        if chunk.error is not None:
            output.failure = output.failure or _failure(chunk.error, 500)
            return
        details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            output.num_cached_tokens = self._check_cached(details.cached_tokens)
        if len(chunk.choices) > 1:
            raise MessageError(f"expected one choice in a chunk, got {len(chunk.choices)}", code="several_choices")
        for choice in chunk.choices:
            self._take(choice, output)

    def _remove_prompt(self, data: bytes) -> bytes:
        """Remove the repeated prompt from an event. Raises MessageError if it differs from the request's prompt."""
        match = _PROMPT_IDS_FIELD.search(data)
        if match is not None:
            begin, end = match.end() - 1, data.find(b"]", match.end()) + 1
            if data[begin:end].translate(None, b" \t\r") != msgspec.json.encode(self._prompt):
                message = "expected the prompt that was sent, got another one: the server's tokenizer differs"
                raise MessageError(message, code="another_prompt")
            data = data[:begin] + b"null" + data[end:]
        self._events.max_bytes = MAX_LINE_BYTES
        if len(data) > MAX_LINE_BYTES:
            message = f"expected an event of at most {MAX_LINE_BYTES:,} bytes without its prompt, got more"
            raise MessageError(message, code="chunk_too_long")
        return data

    def _check_cached(self, num_cached: int) -> int:
        if not 0 <= num_cached <= len(self._prompt):
            message = f"expected at most {len(self._prompt)} cached prompt tokens, got {num_cached}"
            raise MessageError(message, code="invalid_cached_tokens")
        return num_cached

    def _take(self, choice: _Choice, output: OpenAIChunk) -> None:
        if choice.index != 0:
            raise MessageError(f"expected one choice, got index {choice.index}", code="unexpected_choice")
        if choice.token_ids is None and choice.text:
            message = "expected token ids (return_token_ids), got none; vLLM sends them from 0.10.2 on"
            raise MessageError(message, code="token_ids_missing")
        token_ids = choice.token_ids or []
        self._check_tokens(token_ids, choice.finish_reason)
        output.token_ids += token_ids
        output.logprobs += self._logprobs(token_ids, choice.logprobs)
        if choice.finish_reason is None:
            return
        output.reason = self._reason = REASONS.get(choice.finish_reason)
        if self._reason is None:
            message = f"the server ended the response with {choice.finish_reason[:MAX_SHOWN_CHARS]!r}"
            output.failure = output.failure or OpenAIFailure(500, message)

    def _check_tokens(self, token_ids: list[int], finish_reason: str | None) -> None:
        if self._reason is not None and (token_ids or finish_reason):
            raise MessageError("expected no tokens after the end of a response, got some", code="tokens_after_end")
        self._num_tokens += len(token_ids)
        if self._num_tokens > self._max_tokens:
            message = f"expected up to {self._max_tokens} tokens, got {self._num_tokens}"
            raise MessageError(message, code="too_many_tokens")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocabulary_size):
            invalid_id = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocabulary_size)
            message = f"expected token ids from 0 to {self._vocabulary_size - 1}, got {invalid_id}"
            raise MessageError(message, code="unknown_token_id")

    def _logprobs(self, token_ids: list[int], received: _Logprobs | None) -> list[TokenLogprobs]:
        if self._num_alternatives is None or not token_ids:
            return []
        top_lists = [] if received is None else received.top_logprobs or [None] * len(token_ids)
        if received is None or not len(token_ids) == len(received.token_logprobs) == len(top_lists):
            _refuse_logprobs("expected one log-probability for each token, got more or fewer")
        return [
            self._entry(token, value, top_list)
            for token, value, top_list in zip(token_ids, received.token_logprobs, top_lists, strict=True)
        ]

    def _entry(self, token_id: int, value: float | None, top: dict[str, float | None] | None) -> TokenLogprobs:
        """Build an entry. The server sends no ranks, so a token outside the top list ranks after all of the list."""
        if value is None or not isfinite(value):
            _refuse_logprobs(f"expected a finite log-probability of a chosen token, got {value}")
        alternatives = sorted(
            ((_token_of(name), -float("inf") if logprob is None else logprob) for name, logprob in (top or {}).items()),
            key=lambda pair: (-pair[1], pair[0]),
        )
        rank = 1 + sum(logprob > value for token, logprob in alternatives if token != token_id)
        return TokenLogprobs(token_id, value, rank, tuple(alternatives[: self._num_alternatives]))


def refusal_of(status: int, body: bytes) -> OpenAIFailure:
    """Extract the server's error from a response body of any form."""
    try:
        received = _error_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return OpenAIFailure(status, _excerpt(body) or "no reason")
    if received.error is not None:
        return OpenAIFailure(status, _failure(received.error, status).message)
    return OpenAIFailure(status, (received.message or received.detail or _excerpt(body))[:MAX_SHOWN_CHARS])


def error_of(failure: OpenAIFailure, retry_after: str, num_waiting: int) -> QuireError | None:
    """Return the error for the client; None if the server, not the request, caused the failure."""
    if failure.status in FULL_STATUSES:
        retry_s = int(retry_after) if retry_after.isdecimal() else RETRY_AFTER_S
        return QueueFullError(num_waiting, num_waiting, max(1, min(retry_s, MAX_RETRY_S)))
    if failure.status in REJECTED_STATUSES or failure.status >= 500:
        return None
    return RequestError(f"an OpenAI member refused the request: {failure.message}")


def _failure(error: _ErrorFields | str, status: int) -> OpenAIFailure:
    if isinstance(error, str):
        return OpenAIFailure(status, error[:MAX_SHOWN_CHARS])
    code = error.code
    is_status = isinstance(code, int) and 400 <= code <= 599
    return OpenAIFailure(code if is_status and isinstance(code, int) else status, error.message[:MAX_SHOWN_CHARS])


def _token_of(name: str) -> int:
    number = name.removeprefix(TOKEN_ID)
    if number == name or not number.isascii() or not number.isdecimal() or len(number) > 10:
        _refuse_logprobs(f"expected tokens of log-probabilities as {TOKEN_ID}NUMBER, got {name[:MAX_SHOWN_CHARS]!r}")
    return int(number)


def _refuse_logprobs(message: str) -> NoReturn:
    raise MessageError(message, code="invalid_logprobs")


def _excerpt(data: bytes) -> str:
    return data[:MAX_SHOWN_CHARS].decode("utf-8", "replace")
