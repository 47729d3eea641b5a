"""A malicious member of a fleet: an OpenAI-compatible server that sends what no honest server does, a *lie*.

GET /lie/NAME     send this lie from now on      GET /lies     how often each lie was sent

python -m proofs.findings.members.lying_member
"""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import zmq

from tests.support.servers.openai_server import OpenAIServer
from tests.support.servers.talkers import TEMPLATE, talker

CHUNK_BYTES = 1 << 16
LONG_LINE = 64 << 20
MANY_CHOICES = 3_000_000
PAGE_BYTES = 16 << 20
NUM_BLOCKS = 100
"""How many KV blocks the metrics of `OpenAIServer` claim."""
STREAM_LIES = ("one_line", "choices", "tokens", "empty_chunks", "logprobs", "trailers", "half_lines")
PAGE_LIES = ("long_page", "worst_page")
EVENT_LIES = ("many_names", "ahead", "come_and_go", "many_events", "large_batches", "no_batches")
ALL_LIES = (*STREAM_LIES, *PAGE_LIES, *EVENT_LIES)


class LyingServer(OpenAIServer):
    """Lies where `lie` says so, and is honest otherwise."""

    lie = ""
    lies: Counter[str]

    def _answered(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path.startswith("/lie/"):
            self.lie = path.removeprefix("/lie/")
            return 200, {}
        if path == "/lies":
            return 200, dict(self.lies)
        if path == "/metrics" and self.lie in PAGE_LIES:
            self.lies[self.lie] += 1
            if self.lie == "long_page":
                return 200, "# " + "x" * PAGE_BYTES
            return 200, self._metrics() + "vllm:num_requests_running 1\nvllm:cache_config_info{aaa} 1\n" * 4_000
        return super()._answered(path, body)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if self.lie not in STREAM_LIES:
            await super()._stream(writer, body)
            return
        self.lies[self.lie] += 1
        for piece in stream_of(self.lie, body):
            for start in range(0, len(piece), CHUNK_BYTES):
                part = piece[start : start + CHUNK_BYTES]
                # Trailers come after the last chunk, and are not chunks themselves.
                writer.write(part if self.lie == "trailers" else b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()


def stream_of(lie: str, body: dict[str, Any]) -> Iterator[bytes]:
    """The pieces of a lying stream."""
    match lie:
        case "one_line":
            yield from [b"data: ", *[b"x" * (1 << 20)] * (LONG_LINE >> 20)]
        case "choices":
            yield b'data: {"choices":['
            yield from [b'{"token_ids":[1]},' * (MANY_CHOICES // 100)] * 100
        case "tokens":
            yield b'data: {"choices":[{"token_ids":[1]}]}\n' * body["max_tokens"]
            yield from [b": nothing more\n" * 10_000] * 100
        case "empty_chunks":
            yield from [b'data: {"choices":[{}]}\n' * 10_000] * 1_000
        case "logprobs":
            yield b'data: {"choices":[{"token_ids":[1],"logprobs":{"tokens":[],"token_logprobs":[],"top_logprobs":['
            yield b"{}," * 150_000 + b"{}]}}]}\n"
        case "trailers":
            yield b"0\r\n"
            yield from [b"X-Trailer: 1\r\n" * 10_000] * 1_000
        case _:
            yield from [b"data: " + b"x" * 400_000 + b"\n"] * 100


def batch(number: int, *events: Any) -> list[bytes]:
    """The frames of one batch of KV events."""
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([float(number), list(events), 0])]


def stored(first: int, num_blocks: int, block_size: int = 4) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [*range(first, first + num_blocks)], "parent_block_hash": None}
    return {**event, "block_size": block_size, "token_ids": [first % 1000] * (num_blocks * block_size)}


def batches(server: LyingServer) -> Iterator[list[bytes]]:
    """Endless batches of the current lie; empty where the lie is not about KV events."""
    garbage = b"\xc1" * (1 << 20)
    removed = {"type": "BlockRemoved", "block_hashes": list(range(100_000))}
    for number in count():
        match server.lie:
            case "many_names":
                yield batch(number, stored(number * 20_000, 20_000))
            case "ahead":
                yield [b"", (2 * number + 5).to_bytes(8, "big"), garbage]
            case "come_and_go":
                yield batch(number, *[stored(number, 50), ["AllBlocksCleared"]] * 200)
            case "many_events":
                yield batch(number, *[["AllBlocksCleared"]] * 10_000)
            case "large_batches":
                yield batch(number, stored(0, 50), *[removed] * 7)
            case "no_batches":
                yield [b"", number.to_bytes(8, "big"), garbage]
            case _:
                yield []


def publish(server: LyingServer, socket: "zmq.Socket[bytes]", is_over: threading.Event) -> None:
    """Publish batches as quickly as the subscriber takes them; runs in a thread."""
    for frames in batches(server):
        if is_over.is_set():
            return
        if frames:
            server.lies[server.lie] += 1
            socket.send_multipart(frames)
        is_over.wait(0.001 if frames else 0.05)


async def serve() -> None:
    """Serve until the process is killed. Writes its line for a list of members to stderr."""
    text = talker(template=TEMPLATE).text
    server = LyingServer(text.vocabulary_size, lambda prompt: text.tokenizer.encode(prompt, add_special_tokens=False))
    server.lies = Counter()
    await server.start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, 64)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    threading.Thread(target=publish, args=(server, socket, threading.Event()), daemon=True).start()
    sys.stderr.write(f"member at {server.line} events=tcp://127.0.0.1:{port}, a liar\n")
    sys.stderr.flush()
    await asyncio.Event().wait()


def main(_words: Sequence[str]) -> None:
    """Run the server."""
    asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1:])
