"""B: a member's `/metrics` was read up to 16 MB every second, line by line and with the square of a line's length."""

import asyncio
import logging
from collections.abc import Callable
from time import thread_time

import pytest

from quire.errors import MessageError
from quire.fleet.openai.metrics import read_metrics
from quire.http_client import ServerAddress, fetch
from tests.support.errors import raises_code
from tests.support.servers.openai_server import openai_server
from tests.unit.fleet.openai.test_link import fleet_of, until

PAGE_BYTES = 256 << 10


def page_of(line: bytes) -> Callable[[int], bytes]:
    return lambda size: (line * (size // len(line) + 1))[:size]


@pytest.mark.parametrize(
    "page",
    [
        lambda size: b"vllm:cache_config_info{" + b"a" * size + b"} 1",
        page_of(b"vllm:num_requests_running"),
        page_of(b"vllm:num_requests_running 1\n"),
        page_of(b'vllm:cache_config_info{block_size="1",num_gpu_blocks="1"} 1\n'),
        page_of(b"\n"),
        page_of(b"vllm:num_requests_running{} } } "),
    ],
    ids=["a long label", "one name in one line", "one name", "sizes", "nothing", "brackets"],
)
def test_a_page_twice_as_long_takes_at_most_about_twice_as_long(page: Callable[[int], bytes]) -> None:
    once, twice = page(PAGE_BYTES // 8), page(PAGE_BYTES // 4)
    rounds = [(seconds_of(once), seconds_of(twice)) for _ in range(5)]
    least, least_twice = (min(found) for found in zip(*rounds, strict=True))
    assert least_twice <= 2.6 * least + 0.001


def seconds_of(page: bytes) -> float:
    began_s = thread_time()
    read_metrics(page)
    return thread_time() - began_s


async def served(first: bytes, then: bytes, code: str) -> None:
    """A server that sends this, then that without an end, is left with an error of this code."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + first)
            while True:
                writer.write(then)
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with raises_code(MessageError, code):
        await fetch(ServerAddress("127.0.0.1", port), "GET", "/metrics", timeout_s=60.0)
    server.close()


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        (b"", b"400\r\n" + b"x" * 1024 + b"\r\n", "body_too_long"),
        (b"0\r\n", b"X-Trailer: 1\r\n" * 100, "body_missing"),
        (b"1;", b"x" * 1000, "body_missing"),
    ],
    ids=["a body", "trailers", "an extension of a chunk"],
)
def test_what_a_server_sends_without_an_end_is_not_collected(first: bytes, then: bytes, code: str) -> None:
    asyncio.run(served(first, then, code))


def test_a_member_whose_figures_are_too_long_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with openai_server() as server, fleet_of(server.line) as model:
            server.more_metrics = "# " + "x" * (2 * PAGE_BYTES)
            await until(lambda: model.fleet.num_ready == 0)
            server.more_metrics = ""
            await until(lambda: model.fleet.num_ready == 1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert f"at most {PAGE_BYTES} bytes" in caplog.text
