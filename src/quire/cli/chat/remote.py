"""HTTP client of `quire chat --url` and of other commands. Token counts come from the server's usage. This module must
work without the engine's packages.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, MessageError, QuireError, RequestError
from quire.http_client import OK, HttpClient, ServerAddress, fetch, iterate

if TYPE_CHECKING:
    from quire.client.reply.outputs import Completion, Piece
    from quire.client.request.params import SamplingParams

TIMEOUT_S = 600.0
MAX_EVENT_BYTES = 8_388_608
MAX_BODY_BYTES = 67_108_864
PROGRESS_OWNERS = ("quire", "llamacpp")
"""Owners that servers with `return_progress` give to their models."""
"""Maximum size of a response body, because the server is not trusted."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A server and one of its models."""

    url: str
    model: str
    key: str | None = None
    reports_progress: bool = False
    """Whether the server has `return_progress`; some others reject unknown fields."""

    @classmethod
    def connect(cls, url: str, model: str | None, key: str | None) -> "Remote":
        """Select a model of the server at this URL; default: its first. Raises ConfigError if the model is missing."""
        base = server_at(url).url
        cards = fetch_json(server_at(url, key), "GET", "/v1/models")["data"]
        names = [str(card["id"]) for card in cards]
        if not names:
            raise ConfigError(f"the server at {base} has no model")
        if model is not None and model not in names:
            raise ConfigError(f"expected a model of the server at {base} ({', '.join(names)}), got {model!r}")
        return cls(base, model or names[0], key, cards[0].get("owned_by") in PROGRESS_OWNERS)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: "SamplingParams",
        is_stopped: Callable[[], bool],
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> "Iterator[Piece | Completion]":
        """Yield the pieces of a response, then the completion. Closing the connection cancels the request.
        `on_progress` is called with the processed tokens of the prompt and all its tokens."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_progress": True} if self.reports_progress else {}),
        }
        state = _StreamState()
        try:
            for event in iterate(self._events(body), is_stopped):
                if progress := event.get("prompt_progress"):
                    on_progress(progress["processed"], progress["total"])
                yield from state.add(event)
        except (OSError, MessageError, ValueError) as error:
            if not is_stopped():  # if the user stopped the response, the completion has the output so far
                raise QuireError(f"connection to {self.url} lost: {error}; check that the server runs") from error
        if is_stopped():
            state.reason = state.reason or "cancelled"
        yield state.completion()

    async def _events(self, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream. Raises MessageError if the stream was truncated (ends without [DONE])."""
        client = HttpClient(server_at(self.url, self.key), read_s=TIMEOUT_S)
        async with client.request("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            if response.status != OK:
                raise response_error(response.status, await response.read_all())
            async for event in response.events(MAX_EVENT_BYTES):
                if event.data == b"[DONE]":
                    return
                yield json.loads(event.data)
        raise MessageError("the stream ended without [DONE]")


def fetch_json(server: ServerAddress, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Send a request and return the JSON body of the response. Raises ConfigError if there is no valid response and
    RequestError if the server responds with an error."""
    data = None if body is None else json.dumps(body).encode()
    try:
        response = fetch(server, method, path, data, timeout_s=TIMEOUT_S, max_bytes=MAX_BODY_BYTES)
        status, answer = asyncio.run(response)
        if status == OK:
            return dict(json.loads(answer))
    except (OSError, MessageError, ValueError) as error:
        message = f"no server reachable at {server.url}: {error}; start one with: quire serve MODEL"
        raise ConfigError(message, code="server_unreachable") from error
    raise response_error(status, answer)


def response_error(status: int, body: bytes) -> RequestError:
    """Convert an error response to a RequestError with the server's message and code."""
    try:
        error = json.loads(body)["error"]
        return RequestError(str(error["message"]), code=error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return RequestError(f"the server responded with {status}")


def server_at(url: str, key: str | None = None) -> ServerAddress:
    """Parse a server's URL, ignoring its path. Raises ConfigError for an invalid URL."""
    return replace(ServerAddress.parse(url, key), path="")


@dataclass
class _StreamState:
    """Output and usage received so far from one stream."""

    started_s: float = field(default_factory=monotonic)
    first_s: float | None = None
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> "Iterator[Piece]":
        from quire.client.reply.outputs import REASONING, Piece

        if "error" in event:
            raise RequestError(str(event["error"].get("message", "the stream failed")))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.reason = choice.get("finish_reason") or self.reason
            delta = choice.get("delta", {})
            if reasoning := delta.get("reasoning"):
                self.first_s = self.first_s or monotonic()
                self.reasoning.append(reasoning)
                yield Piece(0, reasoning, part=REASONING)
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
            0, "".join(self.texts), (0,) * num_output, self.reason or "cancelled", reasoning="".join(self.reasoning)
        )
        timings = Timings(0.0, (self.first_s or now_s) - self.started_s, now_s - self.started_s)
        return Completion("remote", (0,) * num_prompt, (answer,), cached, 0, timings)
