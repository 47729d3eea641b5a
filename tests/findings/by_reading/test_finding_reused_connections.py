"""`quire bench` counted requests as broken whose kept connection a server had closed: after streams many do.

A request whose reused connection ends before an answer has begun goes once more over a new one. The gateway's client
and those of the command line keep no connection; the benchmark's does.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from quire.bench.calls import HttpCall
from quire.bench.http_client import Client
from quire.bench.outcome import Outcome
from quire.http_client import ServerAddress, fetch

EVENT = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(EVENT), EVENT)
HALF_ANSWER = STREAM[: len(STREAM) - 10]
CALL = HttpCall("r1", "all", "/v1/completions", json.dumps({"prompt": "x" * 100_000}).encode(), 3)


@dataclass
class Closing:
    """A server that answers the first request of a connection, and ends the connection at the beginning of the next."""

    last_words: bytes = b""
    num_connections: int = 0
    requests: list[int] = field(default_factory=list)
    """By the number of their connection: those that were seen to begin."""
    url: str = ""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        number = self.num_connections
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(number)
        size = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        await reader.readexactly(int(size.partition(b":")[2]))
        writer.write(STREAM)
        with suppress(ConnectionError):
            await self._next(reader, writer, number)

    async def _next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if await reader.read(1):
            self.requests.append(number)
            writer.write(self.last_words)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def closing(last_words: bytes = b"") -> AsyncIterator[Closing]:
    server = Closing(last_words)
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()
    for writer in server.writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_a_request_whose_kept_connection_was_closed_goes_over_a_new_one() -> None:
    async def run() -> tuple[list[Outcome], Closing]:
        async with closing() as server, Client(ServerAddress.parse(server.url)) as client:
            return [await client.send(CALL) for _ in range(4)], server

    done, server = asyncio.run(run())
    assert [one.error for one in done] == [None] * 4
    assert [one.text for one in done] == ["a"] * 4
    assert server.requests.count(1) == 2, "the second request went over the first connection, and was not answered"


def test_once_an_answer_has_begun_it_is_not_sent_again() -> None:
    async def run() -> tuple[list[Outcome], Closing]:
        async with closing(HALF_ANSWER) as server, Client(ServerAddress.parse(server.url)) as client:
            return [await client.send(CALL) for _ in range(2)], server

    done, server = asyncio.run(run())
    assert [one.error for one in done] == [None, "broken"]
    assert server.num_connections == 1


def test_a_new_connection_that_is_closed_is_an_error_at_once() -> None:
    async def refused(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def run() -> Outcome:
        listening = await asyncio.start_server(refused, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with listening, Client(ServerAddress.parse(url)) as client:
            return await client.send(CALL)

    seen = list[int]()
    assert asyncio.run(run()).error == "broken"
    assert len(seen) == 1


@pytest.mark.parametrize("num_requests", [3])
def test_the_gateways_client_has_a_connection_for_each_request(num_requests: int) -> None:
    async def run() -> Closing:
        async with closing() as server:
            host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
            for _ in range(num_requests):
                assert (await fetch(ServerAddress(host, port), "GET", "/metrics"))[0] == 200
            return server

    assert asyncio.run(run()).requests == [1, 2, 3]
