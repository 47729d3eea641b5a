"""One server, asked over aiohttp: a call in, an outcome out, never an exception. Reads bytes, stamps them, then parses.

A stamp is taken when a read returns, before a single byte is looked at, so that parsing is not counted as waiting.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

import aiohttp

from quire.bench.calls import HttpCall
from quire.bench.outcome import BROKEN, CONNECT, EMPTY, SERVER, TIMEOUT, UNREADABLE, Outcome
from quire.bench.sse_reader import DONE, EventSplitter, SseEvent, UnreadableError, Usage, read_event
from quire.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 2.0
SECONDS_BETWEEN_LOOKS = 0.25
DETAIL_CHARS = 300


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
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"expected a server URL that begins with http:// or https://, got {self.url!r}", ("url",))
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))


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

    def take(self, event: SseEvent, now_s: float) -> None:
        if event.piece:
            self.pieces.append(event.piece)
            self.token_s.append(now_s)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.usage = event.usage or self.usage
        self.error = event.error or self.error

    @property
    def failure(self) -> str | None:
        if self.error is not None:
            return SERVER
        if not self.is_done and self.finish_reason is None:
            return BROKEN
        # Tokens that show nothing are an answer all the same, where the server says that it made some.
        has_tokens = self.usage is not None and self.usage.output_tokens
        return None if self.pieces or has_tokens else EMPTY


@dataclass(slots=True)
class _ConnectionUse:
    """What is seen of one request's connection."""

    is_reused: bool = False


async def _note_reuse(_session: object, context: Any, _params: object) -> None:
    if isinstance(context.trace_request_ctx, _ConnectionUse):
        context.trace_request_ctx.is_reused = True


class Client:
    """Connections to one server. Enter it on an event loop."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None
        """Each of its requests has a connection of its own."""

    async def __aenter__(self) -> "Client":
        # As many connections as there are requests: a load must not wait in its own client.
        # Idle ones are left before a server leaves them: many do after five seconds, in the middle of a request.
        self._session = self._session_over(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S))
        self._fresh = self._session_over(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    def _session_over(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self.server.headers}
        if self.server.key:
            headers["Authorization"] = f"Bearer {self.server.key}"
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            headers=headers,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self.server.timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=1 << 18,
            trace_configs=[tracing],
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened().close()
        if self._fresh is not None:
            await self._fresh.close()

    async def send(self, call: HttpCall, due_s: float | None = None) -> Outcome:
        """Send one call and read its answer to the end. Whatever goes wrong is in the outcome."""
        answer = _Answer()
        sent_s = perf_counter()
        error, detail = None, ""
        try:
            await self._read(call, answer)
            error, detail = answer.failure, answer.error or ""
        except (RefusedError, UnreadableError, TimeoutError, aiohttp.ClientError, OSError) as failure:
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
        patience = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        async with self._opened().get(f"{self.server.url}/v1/models", timeout=patience) as response:
            if response.status != 200:
                raise RefusedError(response.status, await response.text())
            fields: Any = json.loads(await response.read())
        return [ModelCard(str(card["id"]), card.get("max_model_len")) for card in fields["data"]]

    async def ready(self, timeout_s: float, model: str | None = None) -> ModelCard:
        """The model to be asked, once the server answers; waits for it so long."""
        until_s = perf_counter() + timeout_s
        while True:
            try:
                cards = await self.models()
            except (RefusedError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as failure:
                if perf_counter() >= until_s:
                    raise ConfigError(
                        f"expected a response of {self.server.url}/v1/models within {timeout_s:g} s: "
                        f"{_reason(failure)}; start the server, or check --url and --api-key"
                    ) from failure
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
                continue
            return _chosen(cards, model, self.server.url)

    async def _read(self, call: HttpCall, answer: _Answer) -> None:
        splitter = EventSplitter()
        async with await self._posted(call) as response:
            if response.status != 200:
                raise RefusedError(response.status, (await response.content.read(4096)).decode("utf-8", "replace"))
            content = response.content
            while chunk := await content.readany():
                now_s = perf_counter()
                for data in splitter.feed(chunk):
                    if data == DONE:
                        answer.is_done = True
                    else:
                        answer.take(read_event(data), now_s)

    async def _posted(self, call: HttpCall) -> aiohttp.ClientResponse:
        """The head of the answer. A server may close a connection that was kept while the next request is on its way:
        one that ends before a byte of the answer came says nothing of the request, which goes once over a new one."""
        url, use = f"{self.server.url}{call.path}", _ConnectionUse()
        try:
            return await self._opened().post(url, data=call.body, trace_request_ctx=use)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not use.is_reused or self._fresh is None:
                raise
        return await self._fresh.post(url, data=call.body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ConfigError("expected a Client that was entered: async with Client(server) as client")
        return self._session


def _kind(failure: BaseException) -> str:
    match failure:
        case RefusedError():
            return f"http {failure.status}"
        case UnreadableError():
            return UNREADABLE
        case TimeoutError():
            return TIMEOUT
        case aiohttp.ClientConnectorError():
            return CONNECT
        case _:
            return BROKEN


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
