"""One server under load: a call in, an outcome out, never an exception. Reads bytes, stamps them, then parses.

A stamp is taken when a read returns, before the events in it are looked at, so that parsing is not counted as waiting.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

from quire.bench.calls import HttpCall
from quire.bench.outcome import BROKEN, CONNECT, EMPTY, SERVER, TIMEOUT, UNREADABLE, Outcome
from quire.bench.stream_chunks import StreamChunk, Usage, read_chunk
from quire.errors import ConfigError, MessageError
from quire.http_client import OK, HttpClient, HttpServer, SseReader, fetch

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 2.0
"""Kept connections are closed before a server closes them: many do after five seconds, in the middle of a request."""
SECONDS_BETWEEN_LOOKS = 0.25
DETAIL_CHARS = 300
MAX_EVENT_BYTES = 1 << 22
MAX_LIST_BYTES = 1 << 22
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where it is and how to be let in."""

    url: str
    """Its root: paths of the API are added to it, a final /v1 is taken off."""
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 600.0
    """Longest time for one answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.server.url)

    @property
    def server(self) -> HttpServer:
        """For the client. Raises ConfigError for an invalid URL."""
        return HttpServer.at(self.url, self.key, (("Accept", "text/event-stream"), *self.headers.items()))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server says of a model."""

    name: str
    max_tokens: int | None
    """Longest sequence, where it says so."""


class RefusedError(Exception):
    """An answer with a status that is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


@dataclass(slots=True)
class _Answer:
    """What has come of one answer so far."""

    pieces: list[str] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False

    def take(self, chunk: StreamChunk, now_s: float) -> None:
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
        # Tokens that show nothing are an answer all the same, where the server says that it made some.
        has_tokens = self.usage is not None and self.usage.output_tokens
        return None if self.pieces or has_tokens else EMPTY


class Client:
    """Connections to one server, as many as there are requests: a load must not wait in its own client."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self._http = HttpClient(server.server, connect_s=CONNECT_TIMEOUT_S, idle_s=IDLE_S)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    async def send(self, call: HttpCall, due_s: float | None = None) -> Outcome:
        """Send one call and read its answer to the end. Whatever goes wrong is in the outcome."""
        answer = _Answer()
        sent_s = perf_counter()
        error, detail = None, ""
        try:
            async with asyncio.timeout(self.server.timeout_s):
                await self._read(call, answer)
            error, detail = answer.failure, answer.error or ""
        except (RefusedError, MessageError, OSError) as failure:
            error, detail = _kind(failure), str(failure) or type(failure).__name__
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
        """What the server serves. Raises like the HTTP client."""
        server = self._http.server
        status, body = await fetch(server, "GET", "/v1/models", timeout_s=CONNECT_TIMEOUT_S, max_bytes=MAX_LIST_BYTES)
        if status != OK:
            raise RefusedError(status, body.decode("utf-8", "replace"))
        fields: Any = json.loads(body)
        return [ModelCard(str(card["id"]), card.get("max_model_len")) for card in fields["data"]]

    async def ready(self, timeout_s: float, model: str | None = None) -> ModelCard:
        """The model to be asked, once the server answers; waits for it so long."""
        until_s = perf_counter() + timeout_s
        while True:
            try:
                cards = await self.models()
            except (RefusedError, MessageError, OSError, ValueError, KeyError, TypeError) as failure:
                if perf_counter() >= until_s:
                    raise ConfigError(
                        f"expected a response of {self.server.url}/v1/models within {timeout_s:g} s: "
                        f"{_reason(failure)}; start the server, or check --url and --api-key"
                    ) from failure
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                continue
            return _chosen(cards, model, self.server.url)

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
                        answer.take(read_chunk(event.data), now_s)


def _kind(failure: BaseException) -> str:
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
    """One line that cannot steer a terminal: the server is not trusted."""
    return "".join(one if one.isprintable() else " " for one in text).strip()


def _reason(failure: BaseException) -> str:
    if isinstance(failure, RefusedError):
        return f"the server responded with {failure.status}"
    return _printable(f"{type(failure).__name__} {failure}")


def _chosen(cards: list[ModelCard], model: str | None, url: str) -> ModelCard:
    names = [card.name for card in cards]
    if model is None and cards:
        return cards[0]
    if model is not None:
        # A server may answer to names it does not list.
        return cards[names.index(model)] if model in names else ModelCard(model, None)
    raise ConfigError(f"{url} lists no model; name one with --model")
