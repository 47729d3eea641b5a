"""A model on a server, for `quire chat --url` and `quire explain`: HTTP requests, streaming, the server's token counts.

Standard library only: it must work where nothing of the engine is installed.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from quire.errors import ConfigError, QuireError, RequestError

if TYPE_CHECKING:
    from quire.client.reply.outputs import Completion, Piece
    from quire.client.request.params import SamplingParams

TIMEOUT_S = 600.0
MAX_LINE_BYTES = 8_388_608
MAX_BODY_BYTES = 67_108_864
"""Bounds what an untrusted server can send; a truncated body fails to parse."""
LOOK_S = 0.05
"""How often the stop condition is checked."""


@dataclass(frozen=True, slots=True)
class Remote:
    """One server and one of its models."""

    url: str
    model: str
    key: str | None = None

    @classmethod
    def at(cls, url: str, model: str | None, key: str | None) -> "Remote":
        """The server at this address; without a name, the first of its models."""
        base = server_base(url)
        known = [str(card["id"]) for card in cls(base, "", key)._listed()]
        if not known:
            raise ConfigError(f"the server at {base} has no model")
        if model is not None and model not in known:
            raise ConfigError(f"expected a model of the server at {base} ({', '.join(known)}), got {model!r}")
        return cls(base, model or known[0], key)

    @classmethod
    def unlisted(cls, url: str, key: str | None) -> "Remote":
        """The server at this address, for requests whose body names the model."""
        return cls(server_base(url), "", key)

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
        connection = self._connection()
        try:
            connection.connect()
            with _cut_when(is_stopped, connection.sock):
                response = self._request(connection, "POST", "/v1/chat/completions", body)
                for event in _events(response):
                    yield from state.take(event)
                    if is_stopped():
                        break
        except (OSError, HTTPException, ValueError) as error:
            # After Ctrl-C the user gets the output so far; the connection was cut for that.
            if not is_stopped():
                raise QuireError(f"connection to {self.url} lost: {error}; is the server still running?") from error
        finally:
            connection.close()
        if is_stopped():
            state.reason = state.reason or "cancelled"
        yield state.completion()

    def _listed(self) -> list[dict[str, Any]]:
        return list(self._fetch_json("GET", "/v1/models", None)["data"])

    def _fetch_json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The JSON body of one response."""
        connection = self._connection()
        try:
            return dict(json.loads(self._request(connection, method, path, body).read(MAX_BODY_BYTES)))
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigError(
                f"no server reachable at {self.url}: {error}; start one with: quire serve MODEL"
            ) from error
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)

    def _request(self, connection: HTTPConnection, method: str, path: str, body: Any) -> HTTPResponse:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RequestError(_complaint(response))
        return response


def _complaint(response: HTTPResponse) -> str:
    try:
        return str(json.loads(response.read(65536))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server responded with {response.status}"


def server_base(url: str) -> str:
    """Scheme and host of a URL. Raises ConfigError for an invalid one."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        is_good = False
    if not is_good:
        rule = f"expected a server address such as http://127.0.0.1:8000, got {url!r}; correct it"
        raise ConfigError(rule, code="invalid_server_address")
    return f"{parts.scheme}://{parts.netloc}"


@contextmanager
def _cut_when(is_stopped: Callable[[], bool], wire: socket.socket) -> Iterator[None]:
    """Shut the connection down when the user stops: a queued request sends nothing that would wake the reader."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            if is_stopped():
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
                return

    watching = threading.Thread(target=watch, name="quire-chat-stop", daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


def bounded_lines(response: HTTPResponse) -> Iterator[bytes]:
    """Lines of a stream, each of bounded length."""
    while line := response.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise HTTPException(f"expected a stream line of at most {MAX_LINE_BYTES:,} bytes, got more")
        yield line


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Events of a stream. Raises HTTPException for a stream that ends without [DONE]: it was cut."""
    for line in bounded_lines(response):
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise HTTPException("the stream ended without [DONE]")


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
