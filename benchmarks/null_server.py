"""An OpenAI-compatible server without a model: it sends events at a fixed rate, each with the time of its sending.

So a client measures its own overhead. It uses raw asyncio and one write per event, to be as light as possible;
`slowdown` simulates a slower build. Loopback only.

    python -m benchmarks.null_server --port 8901 --first-ms 20 --gap-ms 5
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

MODEL = "null"
HOST = "127.0.0.1"
stamp = perf_counter
"""The clock of the timestamps; a client on the same machine reads the same clock."""


@dataclass(frozen=True, slots=True)
class Manner:
    """Timing and content of the answers."""

    first_s: float = 0.02
    gap_s: float = 0.005
    slowdown: float = 1.0
    """The factor by which every wait is longer."""
    num_phases: int = 1
    """Streams are spread evenly over so many phases of a gap. With 1, streams that start together send together."""
    is_stamped: bool = True
    """Whether each event contains the time of its sending, instead of a word."""


class NullServer:
    """Answers every prompt with the requested number of tokens."""

    def __init__(self, manner: Manner) -> None:
        self.manner = manner
        self._num_streams = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection."""
        try:
            while True:
                path, body = await _request(reader)
                if path.endswith("/completions"):
                    await self._stream(writer, json.loads(body), is_chat="chat" in path)
                else:
                    _send_response(writer, {"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: Mapping[str, Any], *, is_chat: bool) -> None:
        num_tokens = int(body.get("max_tokens") or 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        manner = self.manner
        gap_s, phase = manner.gap_s * manner.slowdown, self._num_streams % manner.num_phases
        self._num_streams += 1
        # Send times are fixed at the start, so a late event does not delay the later ones.
        first_s = perf_counter() + manner.first_s * manner.slowdown + gap_s * phase / manner.num_phases
        for index in range(num_tokens):
            await asyncio.sleep(first_s + index * gap_s - perf_counter())
            piece = repr(stamp()) if manner.is_stamped else " word"
            _send(writer, _chunk(piece, "length" if index == num_tokens - 1 else None, is_chat=is_chat))
        usage = {"prompt_tokens": _length(body), "completion_tokens": num_tokens, "total_tokens": 0}
        _send(writer, json.dumps({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}}))
        _send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")


def _chunk(piece: str, finish_reason: str | None, *, is_chat: bool) -> str:
    content: dict[str, Any] = {"delta": {"content": piece}} if is_chat else {"text": piece}
    return json.dumps({"id": "null", "choices": [{"index": 0, **content, "finish_reason": finish_reason}]})


def _length(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt", "")
    if isinstance(prompt, list):
        return len(prompt)
    messages = body.get("messages", ())
    return len(prompt.split()) + sum(len(message["content"].split()) for message in messages)


def _send(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


def _send_response(writer: asyncio.StreamWriter, fields: Mapping[str, Any]) -> None:
    body = json.dumps(fields).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def _request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    return head[0].split(" ")[1], await reader.readexactly(int(headers.get("content-length", "0")))


@asynccontextmanager
async def null_server(manner: Manner) -> AsyncIterator[str]:
    """Run a server on this event loop while the block runs, and yield its URL."""
    server = await asyncio.start_server(NullServer(manner).serve, HOST, 0)
    async with server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"


async def _main() -> None:
    parser = argparse.ArgumentParser(description="A server without a model, on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0 chooses a free port; the URL is printed")
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=5.0)
    parser.add_argument("--slowdown", type=float, default=1.0)
    parser.add_argument("--phases", type=int, default=1)
    arguments = parser.parse_args()
    manner = Manner(arguments.first_ms / 1000, arguments.gap_ms / 1000, arguments.slowdown, arguments.phases)
    server = await asyncio.start_server(NullServer(manner).serve, HOST, arguments.port)
    print(f"http://{HOST}:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(_main()))
