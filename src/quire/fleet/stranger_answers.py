"""What a server of the OpenAI API streams, read as tokens: bytes in, chunks out. Pure.

    data: {"choices": [{"index": 0, "text": " cat", "token_ids": [2836], "finish_reason": null}]}
    data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    data: [DONE]

Texts are not read: token ids are what is asked for, and a server that does not tell them cannot be a member. Bytes may
be cut anywhere. What cannot be raises `MessageError`, and nothing else.
"""

from dataclasses import dataclass
from math import isfinite
from typing import NoReturn

import msgspec

from quire.core.request import FinishReason
from quire.core.step import TokenLogprobs
from quire.errors import RETRY_AFTER_S, MessageError, QueueFullError, QuireError, RequestError

MAX_LINE_BYTES = 64 << 20
"""The first line may repeat a prompt of a million tokens."""
SHOWN_CHARS = 300
"""Of a server's own words in an error."""
DONE = b"[DONE]"
TOKEN_ID = "token_id:"  # noqa: S105 - how servers write a token's id where a text is meant
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""All others mean that the server broke it off."""
FULL, NOT_LET_IN = (429, 503), (401, 403, 404)
"""Statuses that say nothing of the request: there is no room, or this gateway has no key, or the model is gone."""
MAX_RETRY_S = 600


@dataclass(frozen=True, slots=True)
class StrangerFailure:
    """Why an answer does not go on, by the server's own word."""

    status: int
    """As HTTP counts: below 500 it is the request's own fault."""
    message: str


@dataclass(frozen=True, slots=True)
class StrangerChunk:
    """What some bytes of one answer said."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they were asked for."""
    reason: FinishReason | None = None
    """Why it ended, if it has."""
    num_cached_tokens: int | None = None
    failure: StrangerFailure | None = None
    is_done: bool = False
    """The server has said its last word."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
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


_chunk = msgspec.json.Decoder(_Chunk)
_error_body = msgspec.json.Decoder(_ErrorBody)


class StrangerStream:
    """One answer's stream."""

    def __init__(self, prompt: tuple[int, ...], vocabulary_size: int, num_alternatives: int | None) -> None:
        self._prompt = prompt
        self._vocabulary_size = vocabulary_size
        self._num_alternatives = num_alternatives
        self._rest = bytearray()
        self._reason: FinishReason | None = None
        self._is_done = False

    def feed(self, data: bytes) -> StrangerChunk:
        """What is said by the lines that end in these bytes."""
        *lines, rest = (self._rest + data).split(b"\n") if b"\n" in data else (self._rest + data,)
        self._rest = bytearray(rest)
        if len(self._rest) > MAX_LINE_BYTES:
            raise MessageError(f"a line of a stream has up to {MAX_LINE_BYTES} bytes, more came")
        said = StrangerChunk()
        for line in lines:
            if line.startswith(b"data:"):
                said = _joined(said, self._read(bytes(line[5:]).strip()))
        return said

    def _read(self, data: bytes) -> StrangerChunk:
        if not data or self._is_done:
            return StrangerChunk()
        if data == DONE:
            self._is_done = True
            return StrangerChunk(is_done=True)
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MessageError(f"a chunk of a completion was expected, {_shown(data)!r} came: {error}") from error
        if chunk.error is not None:
            return StrangerChunk(failure=_failure(chunk.error, 500))
        return self._taken(chunk)

    def _taken(self, chunk: _Chunk) -> StrangerChunk:
        details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
        num_cached = None if details is None else details.cached_tokens
        said = StrangerChunk(num_cached_tokens=None if num_cached is None else self._capped(num_cached))
        for choice in chunk.choices:
            if choice.index != 0:
                raise MessageError(f"one answer was asked for, number {choice.index} came")
            said = _joined(said, self._choice(choice))
        return said

    def _capped(self, num_cached: int) -> int:
        if not 0 <= num_cached <= len(self._prompt):
            raise MessageError(f"{num_cached} of {len(self._prompt)} prompt tokens are said to be cached")
        return num_cached

    def _choice(self, choice: _Choice) -> StrangerChunk:
        if choice.prompt_token_ids is not None and tuple(choice.prompt_token_ids) != self._prompt:
            raise MessageError("the server answers another prompt than it was given: its tokens are not ours")
        if choice.token_ids is None and choice.text:
            raise MessageError(
                "the server does not tell token ids, which return_token_ids asks for; vLLM does from 0.10.2 on"
            )
        token_ids = tuple(choice.token_ids or ())
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocabulary_size):
            strange = next(one for one in token_ids if not 0 <= one < self._vocabulary_size)
            raise MessageError(f"the vocabulary has tokens from 0 to {self._vocabulary_size - 1}, {strange} came")
        if self._reason is not None and (token_ids or choice.finish_reason):
            raise MessageError("an answer went on behind its end")
        logprobs = self._logprobs(token_ids, choice.logprobs)
        if choice.finish_reason is None:
            return StrangerChunk(token_ids, logprobs)
        self._reason = REASONS.get(choice.finish_reason)
        if self._reason is None:
            failure = StrangerFailure(500, f"the server ended it with {choice.finish_reason[:SHOWN_CHARS]!r}")
            return StrangerChunk(token_ids, logprobs, failure=failure)
        return StrangerChunk(token_ids, logprobs, self._reason)

    def _logprobs(self, token_ids: tuple[int, ...], told: _Logprobs | None) -> tuple[TokenLogprobs, ...]:
        if self._num_alternatives is None or not token_ids:
            return ()
        tops = [] if told is None else told.top_logprobs or [None] * len(token_ids)
        if told is None or not len(token_ids) == len(told.token_logprobs) == len(tops):
            _lie("log-probabilities were asked for, one for each token")
        return tuple(
            self._entry(token, value, top)
            for token, value, top in zip(token_ids, told.token_logprobs, tops, strict=True)
        )

    def _entry(self, token_id: int, value: float | None, top: dict[str, float | None] | None) -> TokenLogprobs:
        """Ranks are not told: of a token that is not among the likeliest only that it is behind them all is known."""
        if value is None or not isfinite(value):
            _lie("a token that was chosen has a log-probability")
        likeliest = sorted(
            ((_token_of(name), -float("inf") if other is None else other) for name, other in (top or {}).items()),
            key=lambda one: (-one[1], one[0]),
        )
        rank = 1 + sum(other > value for token, other in likeliest if token != token_id)
        return TokenLogprobs(token_id, value, rank, tuple(likeliest[: self._num_alternatives]))


def refusal_of(status: int, body: bytes) -> StrangerFailure:
    """What a server says that did not take a request, whatever form it has."""
    try:
        told = _error_body.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return StrangerFailure(status, _shown(body) or "no reason given")
    if told.error is not None:
        return StrangerFailure(status, _failure(told.error, status).message)
    return StrangerFailure(status, (told.message or told.detail or _shown(body))[:SHOWN_CHARS])


def error_of(failure: StrangerFailure, retry_after: str, num_waiting: int) -> QuireError | None:
    """Why a request was not let in, as its client is told; None: that is the server's own fault."""
    if failure.status in FULL:
        asked_s = int(retry_after) if retry_after.isdecimal() else RETRY_AFTER_S
        return QueueFullError(num_waiting, num_waiting, max(1, min(asked_s, MAX_RETRY_S)))
    if failure.status in NOT_LET_IN or failure.status >= 500:
        return None
    return RequestError(f"a member that is not quire refused it: {failure.message}")


def _joined(first: StrangerChunk, then: StrangerChunk) -> StrangerChunk:
    return StrangerChunk(
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        then.reason or first.reason,
        first.num_cached_tokens if then.num_cached_tokens is None else then.num_cached_tokens,
        first.failure or then.failure,
        first.is_done or then.is_done,
    )


def _failure(error: _ErrorFields | str, status: int) -> StrangerFailure:
    if isinstance(error, str):
        return StrangerFailure(status, error[:SHOWN_CHARS])
    code = error.code
    is_status = isinstance(code, int) and 400 <= code <= 599
    return StrangerFailure(code if is_status and isinstance(code, int) else status, error.message[:SHOWN_CHARS])


def _token_of(name: str) -> int:
    number = name.removeprefix(TOKEN_ID)
    if number == name or not number.isascii() or not number.isdecimal() or len(number) > 10:
        _lie(f"tokens of log-probabilities are written {TOKEN_ID}NUMBER")
    return int(number)


def _lie(rule: str) -> NoReturn:
    raise MessageError(f"{rule}; something else came")


def _shown(data: bytes) -> str:
    return data[:SHOWN_CHARS].decode("utf-8", "replace")
