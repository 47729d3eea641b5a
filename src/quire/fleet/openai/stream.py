"""What a server of the OpenAI API streams, read as tokens: bytes in, chunks out. Pure.

    data: {"choices": [{"index": 0, "text": " cat", "token_ids": [2836], "finish_reason": null}]}
    data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}}
    data: [DONE]

Texts are not read: token ids are what is asked for, and a server that does not tell them cannot be a member. Bytes may
be cut anywhere. What cannot be raises `MessageError`, and nothing else.

All of this runs on the gateway's event loop, so the work is linear in the bytes, and a line has no more of them than
its request allows: only the first repeats the prompt, which is cut out and compared as bytes before JSON is read.
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

MAX_LINE_BYTES = 1 << 19
"""As JSON the worst of such lines takes 35 ms of processor time."""
MAX_TOKEN_BYTES = 12
"""What a token of the prompt adds to the first line, which repeats it."""
_PROMPT = re.compile(rb'"prompt_token_ids"\s*:\s*\[')
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

    def parts(self, num_tokens: int) -> "Sequence[StrangerChunk]":
        """The same in chunks of at most so many tokens; what comes behind tokens is in the last."""
        if len(self.token_ids) <= num_tokens:
            return (self,)
        *borders, last = range(0, len(self.token_ids), num_tokens)
        first = [
            StrangerChunk(self.token_ids[at : at + num_tokens], self.logprobs[at : at + num_tokens]) for at in borders
        ]
        return (*first, replace(self, token_ids=self.token_ids[last:], logprobs=self.logprobs[last:]))


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


_chunk = msgspec.json.Decoder(_Chunk)
_error_body = msgspec.json.Decoder(_ErrorBody)


@dataclass(slots=True)
class _Heard:
    """What the lines of one piece have said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    failure: StrangerFailure | None = None
    is_done: bool = False


class StrangerStream:
    """One answer's stream."""

    def __init__(
        self, prompt: tuple[int, ...], vocabulary_size: int, num_alternatives: int | None, max_tokens: int
    ) -> None:
        self._prompt = prompt
        self._vocabulary_size = vocabulary_size
        self._num_alternatives = num_alternatives
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._rest = bytearray()
        """A line whose end has not come."""
        self._max_bytes = MAX_LINE_BYTES + MAX_TOKEN_BYTES * len(prompt)
        """Of the present line."""
        self._reason: FinishReason | None = None
        self._is_done = False

    def feed(self, data: bytes) -> StrangerChunk:
        """What is said by the lines that end in these bytes."""
        heard = _Heard()
        for line in self._lines(data):
            if line.startswith(b"data:") and not self._is_done:
                self._read(line[5:].strip(), heard)
        return StrangerChunk(
            tuple(heard.token_ids),
            tuple(heard.logprobs),
            heard.reason,
            heard.num_cached_tokens,
            heard.failure,
            heard.is_done,
        )

    def _lines(self, data: bytes) -> list[bytes]:
        """Those that end here. Only new bytes are searched, and what is held is copied once, when its line ends."""
        first, *others = data.split(b"\n")
        self._rest += first
        if len(self._rest) > self._max_bytes:
            raise MessageError(f"a line of this stream has up to {self._max_bytes} bytes, more came")
        if not others:
            return []
        lines, self._rest = [bytes(self._rest), *others[:-1]], bytearray(others[-1])
        return lines

    def _read(self, data: bytes, heard: _Heard) -> None:
        if data == DONE:
            heard.is_done = self._is_done = True
        if not data or self._is_done:
            return
        data = self._without_prompt(data)
        try:
            chunk = _chunk.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MessageError(f"a chunk of a completion was expected, {_shown(data)!r} came: {error}") from error
        if chunk.error is not None:
            heard.failure = heard.failure or _failure(chunk.error, 500)
            return
        details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            heard.num_cached_tokens = self._capped(details.cached_tokens)
        if len(chunk.choices) > 1:
            raise MessageError(f"expected one choice in a chunk, got {len(chunk.choices)}")
        for choice in chunk.choices:
            self._take(choice, heard)

    def _without_prompt(self, data: bytes) -> bytes:
        """A line without the prompt that it repeats, which must be ours."""
        found = _PROMPT.search(data)
        if found is not None:
            begin, end = found.end() - 1, data.find(b"]", found.end()) + 1
            if data[begin:end].translate(None, b" \t\r") != msgspec.json.encode(self._prompt):
                raise MessageError("the server answers another prompt than it was given: its tokens are not ours")
            data = data[:begin] + b"null" + data[end:]
        self._max_bytes = MAX_LINE_BYTES
        if len(data) > MAX_LINE_BYTES:
            raise MessageError(f"a line of a stream has up to {MAX_LINE_BYTES} bytes beside its prompt, more came")
        return data

    def _capped(self, num_cached: int) -> int:
        if not 0 <= num_cached <= len(self._prompt):
            raise MessageError(f"{num_cached} of {len(self._prompt)} prompt tokens are said to be cached")
        return num_cached

    def _take(self, choice: _Choice, heard: _Heard) -> None:
        if choice.index != 0:
            raise MessageError(f"one answer was asked for, number {choice.index} came")
        if choice.token_ids is None and choice.text:
            raise MessageError(
                "the server does not tell token ids, which return_token_ids asks for; vLLM does from 0.10.2 on"
            )
        token_ids = choice.token_ids or []
        self._check_tokens(token_ids, choice.finish_reason)
        heard.token_ids += token_ids
        heard.logprobs += self._logprobs(token_ids, choice.logprobs)
        if choice.finish_reason is None:
            return
        heard.reason = self._reason = REASONS.get(choice.finish_reason)
        if self._reason is None:
            words = f"the server ended it with {choice.finish_reason[:SHOWN_CHARS]!r}"
            heard.failure = heard.failure or StrangerFailure(500, words)

    def _check_tokens(self, token_ids: list[int], finish_reason: str | None) -> None:
        if self._reason is not None and (token_ids or finish_reason):
            raise MessageError("an answer went on behind its end")
        self._num_tokens += len(token_ids)
        if self._num_tokens > self._max_tokens:
            raise MessageError(f"an answer has up to {self._max_tokens} tokens, {self._num_tokens} came")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocabulary_size):
            strange = next(one for one in token_ids if not 0 <= one < self._vocabulary_size)
            raise MessageError(f"the vocabulary has tokens from 0 to {self._vocabulary_size - 1}, {strange} came")

    def _logprobs(self, token_ids: list[int], told: _Logprobs | None) -> list[TokenLogprobs]:
        if self._num_alternatives is None or not token_ids:
            return []
        tops = [] if told is None else told.top_logprobs or [None] * len(token_ids)
        if told is None or not len(token_ids) == len(told.token_logprobs) == len(tops):
            _lie("log-probabilities were asked for, one for each token")
        return [
            self._entry(token, value, top)
            for token, value, top in zip(token_ids, told.token_logprobs, tops, strict=True)
        ]

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
