"""A model on a server, for `quire chat --url` and `quire explain`: requests, streams, the server's token counts.

It must work where nothing of the engine is installed.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from quire.errors import ConfigError, MessageError, QuireError, RequestError
from quire.http_client import OK, HttpClient, HttpServer, fetch, iterate

if TYPE_CHECKING:
    from quire.client.reply.outputs import Completion, Piece
    from quire.client.request.params import SamplingParams

TIMEOUT_S = 600.0
MAX_EVENT_BYTES = 8_388_608
MAX_BODY_BYTES = 67_108_864
"""Bounds what an untrusted server can send."""


@dataclass(frozen=True, slots=True)
class Remote:
    """One server and one of its models."""

    url: str
    model: str
    key: str | None = None

    @classmethod
    def at(cls, url: str, model: str | None, key: str | None) -> "Remote":
        """The server at this address; without a name, the first of its models."""
        base = server_at(url).url
        known = [str(card["id"]) for card in cls(base, "", key)._listed()]
        if not known:
            raise ConfigError(f"the server at {base} has no model")
        if model is not None and model not in known:
            raise ConfigError(f"expected a model of the server at {base} ({', '.join(known)}), got {model!r}")
        return cls(base, model or known[0], key)

    @classmethod
    def unlisted(cls, url: str, key: str | None) -> "Remote":
        """The server at this address, for requests whose body names the model."""
        return cls(server_at(url).url, "", key)

    def explain(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """How much of a body's prompt is cached there, and why the next token is not."""
        return dict(self._fetch_json("POST", "/v1/cache/explain", body))

    def reuse(self, request_id: str) -> dict[str, Any]:
        """The cached tokens of a request that ran there, and the reason for its miss."""
        return dict(self._fetch_json("GET", f"/v1/requests/{quote(request_id, safe='')}/cache", None))

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: "SamplingParams", is_stopped: Callable[[], bool]
    ) -> "Iterator[Piece | Completion]":
        """The response piece by piece, then all of it. Closing the connection cancels the request on the server."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        state = _StreamState()
        try:
            for event in iterate(self._events(body), is_stopped):
                yield from state.take(event)
        except (OSError, MessageError, ValueError) as error:
            if not is_stopped():  # else the user gets the output so far
                raise QuireError(f"connection to {self.url} lost: {error}; is the server still running?") from error
        if is_stopped():
            state.reason = state.reason or "cancelled"
        yield state.completion()

    def _listed(self) -> list[dict[str, Any]]:
        return list(self._fetch_json("GET", "/v1/models", None)["data"])

    def _fetch_json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The JSON body of one response."""
        server, data = server_at(self.url, self.key), None if body is None else json.dumps(body).encode()
        try:
            fetched = fetch(server, method, path, data, timeout_s=TIMEOUT_S, max_bytes=MAX_BODY_BYTES)
            status, answer = asyncio.run(fetched)
            if status == OK:
                return dict(json.loads(answer))
        except (OSError, MessageError, ValueError) as error:
            raise ConfigError(
                f"no server reachable at {self.url}: {error}; start one with: quire serve MODEL"
            ) from error
        raise RequestError(refusal_reason(status, answer))

    async def _events(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Events of a stream. Raises MessageError for a stream that ends without [DONE]: it was cut."""
        client = HttpClient(server_at(self.url, self.key), silence_s=TIMEOUT_S)
        async with client.request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            if response.status != OK:
                raise RequestError(refusal_reason(response.status, await response.whole()))
            async for event in response.events(MAX_EVENT_BYTES):
                if event.data == b"[DONE]":
                    return
                yield json.loads(event.data)
        raise MessageError("the stream ended without [DONE]")


def refusal_reason(status: int, body: bytes) -> str:
    """The error message in a response that is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server responded with {status}"


def server_at(url: str, key: str | None = None) -> HttpServer:
    """The server of a URL of which only scheme and host count. Raises ConfigError for an invalid one."""
    return replace(HttpServer.at(url, key), path="")


@dataclass
class _StreamState:
    """A stream so far."""

    started_s: float = field(default_factory=monotonic)
    first_s: float | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> "Iterator[Piece]":
        from quire.client.reply.outputs import REASONING, Piece

        if "error" in event:
            raise RequestError(str(event["error"].get("message", "the stream failed")))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.reason = choice.get("finish_reason") or self.reason
            delta = choice.get("delta", {})
            if thought := delta.get("reasoning"):
                self.first_s = self.first_s or monotonic()
                self.thoughts.append(thought)
                yield Piece(0, thought, part=REASONING)
            if text := delta.get("content"):
                self.first_s = self.first_s or monotonic()
                self.texts.append(text)
                yield Piece(0, text)

    def completion(self) -> "Completion":
        from quire.client.reply.outputs import Answer, Completion, Timings

        now_s = monotonic()
        num_prompt, num_output = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answer = Answer(
            0, "".join(self.texts), (0,) * num_output, self.reason or "cancelled", reasoning="".join(self.thoughts)
        )
        timings = Timings(0.0, (self.first_s or now_s) - self.started_s, now_s - self.started_s)
        return Completion("remote", (0,) * num_prompt, (answer,), cached, 0, timings)
