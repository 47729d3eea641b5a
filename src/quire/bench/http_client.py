"""Client for one server under load: takes a call and returns an outcome, which also reports failures.

Timestamps are taken when a read returns, before its events are parsed, so that parsing does not count as latency.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from quire.bench.calls import HttpCall
from quire.bench.outcome import BROKEN, CONNECT, EMPTY, SERVER, TIMEOUT, UNREADABLE, Outcome
from quire.errors import ConfigError, MessageError
from quire.http_client import OK, HttpClient, ServerAddress, SseReader, fetch

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 2.0
"""Idle connections are closed after this time; many servers close them after 5 s, which can break a new request."""
RETRY_INTERVAL_S = 0.25
DETAIL_CHARS = 300
MAX_EVENT_BYTES = 1 << 22
MAX_LIST_BYTES = 1 << 22
DONE = b"[DONE]"
ACCEPT = ("Accept", "text/event-stream")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A server's entry for a model in `/v1/models`."""

    name: str
    max_tokens: int | None
    """The longest sequence, if the server reports it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that the server reports."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """The parsed content of one stream event; `piece` is its text, empty if the event has no token."""

    piece: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


class RefusedError(Exception):
    """A response with a status other than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


@dataclass(slots=True)
class _Answer:
    """The data received of one answer so far."""

    pieces: list[str] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False

    def add(self, chunk: StreamChunk, now_s: float) -> None:
        if chunk.piece:
            self.pieces.append(chunk.piece)
            self.token_s.append(now_s)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        self.error = chunk.error or self.error

    @property
    def failure(self) -> str | None:
        if self.error is not None:
            return SERVER
        if not self.is_done and self.finish_reason is None:
            return BROKEN
        # Tokens may have no text; the answer is not empty if the server's usage counts tokens.
        has_tokens = self.usage is not None and self.usage.output_tokens
        return None if self.pieces or has_tokens else EMPTY


class Client:
    """Client of one server, with any number of connections, so that no request waits for a connection."""

    def __init__(self, server: ServerAddress, timeout_s: float = 600.0) -> None:
        """`timeout_s`: the longest time for one response."""
        self.server = replace(server, headers=(ACCEPT, *server.headers))
        self._timeout_s = timeout_s
        self._http = HttpClient(self.server, connect_s=CONNECT_TIMEOUT_S, idle_s=IDLE_S)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def send(self, call: HttpCall, due_s: float | None = None) -> Outcome:
        """Send one call and read its response to the end. Failures are reported in the outcome."""
        answer = _Answer()
        sent_s = perf_counter()
        error, detail = None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(call, answer)
            error, detail = answer.failure, answer.error or ""
        except (RefusedError, MessageError, OSError) as failure:
            error, detail = _error_of(failure), str(failure) or type(failure).__name__
        usage = answer.usage
        return Outcome(
            name=call.name,
            kind=call.kind,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=perf_counter(),
            token_s=tuple(answer.token_s),
            pieces=tuple(answer.pieces),
            prompt_tokens=usage.prompt_tokens if usage else call.prompt_tokens,
            output_tokens=usage.output_tokens if usage and usage.output_tokens else len(answer.pieces),
            cached_tokens=usage.cached_tokens if usage else None,
            finish_reason=answer.finish_reason,
            error=error,
            detail=_printable(detail[:DETAIL_CHARS]),
        )

    async def models(self) -> list[ModelCard]:
        """Return the models that the server lists. Raises RefusedError, and the errors of `fetch` and of parsing."""
        response = fetch(self.server, "GET", "/v1/models", timeout_s=CONNECT_TIMEOUT_S, max_bytes=MAX_LIST_BYTES)
        status, body = await response
        if status != OK:
            raise RefusedError(status, body.decode("utf-8", "replace"))
        fields: Any = json.loads(body)
        return [ModelCard(str(card["id"]), card.get("max_model_len")) for card in fields["data"]]

    async def ready(self, timeout_s: float, model: str | None = None) -> ModelCard:
        """Wait until the server responds, and return the model to use. Raises ConfigError after `timeout_s`."""
        deadline_s = perf_counter() + timeout_s
        while True:
            try:
                cards = await self.models()
            except (RefusedError, MessageError, OSError, ValueError, KeyError, TypeError) as failure:
                if perf_counter() >= deadline_s:
                    raise ConfigError(
                        f"expected a response from {self.server.url}/v1/models within {timeout_s:g} s, got: "
                        f"{_reason(failure)}; start the server, or check --url and --api-key",
                        code="server_unreachable",
                    ) from failure
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            return _choose_card(cards, model, self.server.url)

    async def _read(self, call: HttpCall, answer: _Answer) -> None:
        reader = SseReader(MAX_EVENT_BYTES)
        async with self._http.request("POST", call.path, call.body) as response:
            if response.status != OK:
                raise RefusedError(response.status, (await response.read()).decode("utf-8", "replace"))
            while data := await response.read():
                now_s = perf_counter()
                for event in reader.feed(data):
                    if event.data == DONE:
                        answer.is_done = True
                    else:
                        answer.add(read_chunk(event.data), now_s)


def _error_of(failure: BaseException) -> str:
    match failure:
        case RefusedError():
            return f"http {failure.status}"
        case MessageError():
            return UNREADABLE
        case TimeoutError():
            return TIMEOUT
        case ConnectionError() if not isinstance(failure, ConnectionRefusedError):
            return BROKEN
        case _:
            return CONNECT


def _printable(text: str) -> str:
    """Return one line without control characters, because the server is not trusted."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _reason(failure: BaseException) -> str:
    if isinstance(failure, RefusedError):
        return f"the server responded with {failure.status}"
    return _printable(f"{type(failure).__name__} {failure}")


def _choose_card(cards: list[ModelCard], model: str | None, url: str) -> ModelCard:
    names = [card.name for card in cards]
    if model is None and cards:
        return cards[0]
    if model is not None:
        # A server may accept names that it does not list.
        return cards[names.index(model)] if model in names else ModelCard(model, None)
    raise ConfigError(f"expected a model in {url}/v1/models, got none; pass one with --model")


def read_chunk(data: bytes) -> StreamChunk:
    """Parse one chunk of a completion or a chat completion. Raises MessageError for an invalid one."""
    try:
        fields = json.loads(data)
        if fields.get("error"):
            return StreamChunk(error=_message(fields["error"]))
        choices: Any = fields.get("choices") or ({},)
        return StreamChunk(_piece(choices[0]), choices[0].get("finish_reason"), _usage(fields.get("usage")))
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"expected an event of a completion, got {data[:200]!r}") from error


def _piece(choice: dict[str, Any]) -> str:
    """Return the text, or a chat's reasoning or tool calls, because those consist of tokens, too."""
    delta = choice.get("delta")
    if delta is None:
        return str(choice.get("text") or "")
    text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
    return str(text) if text else json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        int(usage["prompt_tokens"]),
        int(usage.get("completion_tokens") or 0),
        None if cached is None else int(cached),
    )


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
