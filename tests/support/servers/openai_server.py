"""A small server of the OpenAI API on a real socket: the oracle behind `/v1/completions`, as vLLM would answer.

It computes with nobody else around, remembers what it was asked, and can be told to refuse, to lie, to wait or to die.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.backends.oracle import answer_alone
from quire.core.request import ResolvedSampling
from tests.support.servers.talkers import TEMPLATE, talker

BLOCK_SIZE = 4


@dataclass
class OpenAIServer:
    """One that runs, and what a test may change about it."""

    vocabulary_size: int
    encode: Callable[[str], list[int]]
    max_model_len: int = 512
    key: str | None = None
    refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
    """Status, body and headers of what every completion is answered with."""
    says: Callable[[dict[str, Any]], bytes] | None = None
    """How a chunk is written; None: as JSON."""
    has_metrics: bool = True
    more_metrics: str = ""
    """What stands below its figures."""
    is_paced: bool = False
    tokens_at_once: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of all completions that were asked for."""
    num_streaming: int = 0
    num_left: int = 0
    """Streams that their client closed in the middle."""
    num_waiting: int = 0
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """One for each step, where it is paced."""
    port: int = 0
    _blocks: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def line(self) -> str:
        """How it stands in a list of members."""
        return f"openai:http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As if its process were gone: all connections break, and nobody listens."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop_listening(self) -> None:
        """As one that shuts down in order: nobody is let in any more, what has begun goes on."""
        assert self._server is not None
        self._server.close()

    def go(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.permits.release()

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._exchange(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            await _whole(writer, 401, {"error": {"message": "no key", "code": 401}})
        elif (method, path) == ("POST", "/v1/completions"):
            await self._complete(reader, writer, body)
        else:
            await _whole(writer, *self._answered(path, body))

    def _answered(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        match path:
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": "strange", "max_model_len": self.max_model_len}]}
            case "/metrics" if self.has_metrics:
                return 200, self._metrics()
            case "/tokenize":
                return 200, {"tokens": self.encode(body["prompt"]), "count": 0}
            case "/health":
                return 200, ""
            case _:
                return 404, {"detail": "Not Found"}

    def _metrics(self) -> str:
        return (
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",engine="0",num_gpu_blocks="100"}} 1.0\n'
            f'vllm:num_requests_running{{engine="0",model_name="strange"}} {self.num_streaming}.0\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="strange"}} {self.num_waiting}.0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="strange"} 0.25\n'
            f"{self.more_metrics}"
        )

    # -- completions ---------------------------------------------------------------------------------------------------

    async def _complete(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if self.refusal is not None:
            await _whole(writer, *self.refusal)
            return
        self.num_streaming += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        leaving = asyncio.ensure_future(reader.read())
        streaming = asyncio.ensure_future(self._stream(writer, body))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            self.num_left += not streaming.done()
        finally:
            self.num_streaming -= 1
            streaming.cancel()
            leaving.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        prompt, tokens = body["prompt"], answer(body, self.vocabulary_size)
        num_cached = self._cached(body.get("cache_salt", ""), prompt)
        reason = "length" if len(tokens) == body["max_tokens"] else "stop"
        if tokens and tokens[-1] in body["stop_token_ids"] and len(tokens) > body["min_tokens"]:
            reason = "stop"
        for at in range(0, len(tokens), self.tokens_at_once):
            if self.is_paced:
                await self.permits.acquire()
            some = tokens[at : at + self.tokens_at_once]
            choice: dict[str, Any] = {"index": 0, "text": "…", "token_ids": some, "finish_reason": None}
            if at == 0:
                choice["prompt_token_ids"] = prompt
            if body.get("logprobs") is not None:
                choice["logprobs"] = _logprobs(some, body["logprobs"])
            if at + self.tokens_at_once >= len(tokens):
                choice["finish_reason"] = reason
            self._send(writer, {"id": "x", "choices": [choice]})
            await writer.drain()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        self._send(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": num_cached}}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, told: dict[str, Any]) -> None:
        data = json.dumps(told).encode() if self.says is None else self.says(told)
        _chunk(writer, b"data: " + data + b"\n\n")

    def _cached(self, salt: str, prompt: list[int]) -> int:
        ends = range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
        blocks = [(salt, tuple(prompt[:end])) for end in ends]
        num_found = sum(block in self._blocks for block in blocks)
        self._blocks |= {*blocks}
        return num_found * BLOCK_SIZE


def answer(body: dict[str, Any], vocabulary_size: int) -> list[int]:
    """What the oracle answers to a body."""
    return answer_alone(body["prompt"], sampling(body), body["seed"], vocabulary_size)


def sampling(body: dict[str, Any]) -> ResolvedSampling:
    """What a body asks for, as quire says it."""
    return ResolvedSampling(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_k=max(0, body["top_k"]),
        top_p=body["top_p"],
        min_p=body["min_p"],
        repetition_penalty=body["repetition_penalty"],
        presence_penalty=body["presence_penalty"],
        frequency_penalty=body["frequency_penalty"],
        logit_bias=tuple((int(token), bias) for token, bias in body.get("logit_bias", {}).items()),
        allowed_token_ids=tuple(body["allowed_token_ids"]) if "allowed_token_ids" in body else None,
        min_tokens=body["min_tokens"],
        stop_token_ids=frozenset(body["stop_token_ids"]),
        logprobs=body.get("logprobs"),
    )


def _logprobs(tokens: list[int], num_alternatives: int) -> dict[str, Any]:
    """Of no truth, but of the right form: the chosen token is second, or the only one."""
    tops = [
        {f"token_id:{token}": -1.0, **{f"token_id:{at}": -0.5 - at for at in range(num_alternatives) if at != token}}
        for token in tokens
    ]
    names = [f"token_id:{token}" for token in tokens]
    return {"tokens": names, "token_logprobs": [-1.0] * len(tokens), "top_logprobs": tops, "text_offset": []}


async def _whole(
    writer: asyncio.StreamWriter, status: int, body: object, headers: dict[str, str] | None = None
) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data)
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def openai_server(port: int = 0, **settings: Any) -> AsyncIterator[OpenAIServer]:
    """A server with the tokens of the small fleets' oracles."""
    text = talker(template=TEMPLATE).text
    server = OpenAIServer(
        text.vocabulary_size, lambda given: text.tokenizer.encode(given, add_special_tokens=False), **settings
    )
    server.port = port
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
