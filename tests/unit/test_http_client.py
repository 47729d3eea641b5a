"""Requests, responses however their bytes are cut, and server-sent events."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, MessageError
from quire.http_client import (
    HttpClient,
    HttpResponse,
    ServerAddress,
    SseEvent,
    SseReader,
    UnansweredError,
    fetch,
    iterate,
)
from tests.support.errors import raises_code
from tests.support.servers.scripted_server import scripted

EVENTS = (
    b": hello\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\n\nid: 4\ndata: [DONE]\n\n"
    b"event: none\n\nevent: cut\ndata: 1\n"
)

NUM_HELD, NUM_ROUNDS = 8, 20
"""A loop that closes all generators at once, in any order, closes one of these before its holder in some round."""


class TestEvents:
    @given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
    def test_they_are_the_same_however_the_bytes_are_cut(self, cuts: list[int]) -> None:
        reader, found, start = SseReader(100), list[SseEvent](), 0
        for end in (*sorted(cuts), len(EVENTS)):
            found += reader.feed(EVENTS[start:end])
            start = end
        assert found == [(b"", b"one"), (b"x", b"two\nlines"), (b"", b"[DONE]")]

    @given(st.binary(max_size=300))
    def test_whatever_comes_an_event_is_bytes_or_nothing(self, data: bytes) -> None:
        assert all(isinstance(part, bytes) for event in SseReader(1000).feed(data) for part in event)

    @pytest.mark.parametrize("data", [b"x" * 101, b"data: x\n" * 20, b"data: \n\n" + b"x" * 101])
    def test_one_that_is_too_long_is_refused(self, data: bytes) -> None:
        with raises_code(MessageError, "event_too_long"):
            SseReader(100).feed(data)


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
            ("https://models.example:443/v1", "https://models.example"),
            ("https://models.example/quire/v1", "https://models.example/quire"),
            ("http://[::1]:8000", "http://[::1]:8000"),
        ],
    )
    def test_a_url_is_read(self, url: str, told: str) -> None:
        assert ServerAddress.parse(url).url == told

    @pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://[::1"])
    def test_one_that_is_none_is_refused(self, url: str) -> None:
        with raises_code(ConfigError, "invalid_server_address"):
            ServerAddress.parse(url)

    @pytest.mark.parametrize("key", ["two\r\nx-more: 1", "caf\u00e9"])
    def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(self, key: str) -> None:
        server = ServerAddress.parse("http://x", key)
        with pytest.raises(ConfigError) as refused:
            server.encode("GET", "/", None, keep_alive=False)
        assert key not in str(refused.value) + repr(server)

    def test_headers_of_the_caller_come_before_ours(self) -> None:
        data = ServerAddress("x", 80, headers=(("User-Agent", "other"),)).encode("POST", "/", b"{}", keep_alive=False)
        assert b"user-agent: other\r\n" in data
        assert b"content-length: 2\r\n" in data


def answered(*pieces: bytes, path: str = "/") -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        async with scripted(pieces) as url:
            return await fetch(ServerAddress.parse(url), "GET", path, timeout_s=60.0)

    return asyncio.run(run())


class TestResponses:
    def test_what_is_announced_before_a_response_is_passed_over(self) -> None:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        assert answered(early + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") == (200, b"ok")

    def test_a_redirect_is_a_response_and_is_not_followed(self) -> None:
        moved = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        assert answered(moved) == (307, b"")

    def test_a_body_may_end_with_its_connection(self) -> None:
        assert answered(b"HTTP/1.1 200 OK\r\n\r\n", b"a", b"b") == (200, b"ab")

    @pytest.mark.parametrize(
        "data",
        [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, b"HTTP/1.1 101 Up\r\nUpgrade: x\r\n\r\n"],
    )
    def test_what_is_no_response_is_an_error(self, data: bytes) -> None:
        with pytest.raises((MessageError, ConnectionError)):
            answered(data)

    @pytest.mark.parametrize(
        ("data", "kind"),
        [(b"", UnansweredError), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", ConnectionResetError)],
    )
    def test_one_that_is_cut_is_an_error(self, data: bytes, kind: type[ConnectionError]) -> None:
        with pytest.raises(ConnectionError) as cut:
            answered(data)
        assert type(cut.value) is kind

    def test_a_server_on_a_unix_socket_is_reached(self, tmp_path: Path) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)
            writer.close()

        async def run() -> bytes:
            path = tmp_path / "admin.sock"
            async with await asyncio.start_unix_server(serve, path):
                return (await fetch(ServerAddress("localhost", 0, socket_path=path), "GET", "/stats"))[1]

        assert asyncio.run(run()).startswith(b"GET /stats HTTP/1.1\r\nhost: localhost\r\n")

    def test_a_server_that_is_silent_is_left(self) -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.read()
            finally:
                writer.close()

        async def run() -> None:
            async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
                client = HttpClient(ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1]), read_s=0.01)
                async with client.request("GET", "/"):
                    pass

        with pytest.raises(TimeoutError, match=r"no data within 0\.01 s"):
            asyncio.run(run())

    def test_a_second_response_is_no_part_of_the_first(self) -> None:
        async def run() -> HttpResponse:
            one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            async with scripted([one * 2]) as url, HttpClient(ServerAddress.parse(url)).request("GET", "/") as response:
                await response.read_all()
                return response

        with raises_code(MessageError, "malformed_message"):
            asyncio.run(run())


class TestWithoutAnEventLoop:
    def test_the_items_of_a_generator_come_one_by_one_and_it_is_closed(self) -> None:
        closed = list[bool]()

        async def numbers() -> AsyncGenerator[int, None]:
            try:
                for number in range(10):
                    await asyncio.sleep(0)
                    yield number
            finally:
                closed.append(True)

        assert list(iterate(numbers())) == list(range(10))
        few = iterate(numbers())
        assert next(few) == 0
        few.close()
        assert closed == [True, True]

    def test_a_caller_that_stops_does_not_wait_for_the_next(self) -> None:
        stopped = threading.Event()

        async def endless() -> AsyncGenerator[int, None]:
            yield 1
            stopped.set()
            await asyncio.Event().wait()

        assert list(iterate(endless(), stopped.is_set)) == [1]

    def test_an_error_of_the_generator_is_the_callers(self) -> None:
        async def broken() -> AsyncGenerator[int, None]:
            yield 1
            raise ConnectionResetError("cut")

        with pytest.raises(ConnectionResetError):
            list(iterate(broken()))

    def test_a_caller_that_stops_early_closes_what_the_generator_holds(self, caplog: pytest.LogCaptureFixture) -> None:
        closed: list[str] = []

        @asynccontextmanager
        async def connection() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                closed.append("connection")

        async def items() -> AsyncGenerator[int, None]:
            while True:
                yield 1

        async def read() -> AsyncGenerator[int, None]:
            async with AsyncExitStack() as held:
                for _ in range(NUM_HELD):
                    await held.enter_async_context(connection())
                async for item in items():
                    yield item

        for _ in range(NUM_ROUNDS):
            reading = iterate(read())
            assert next(reading) == 1
            reading.close()
        assert closed == ["connection"] * NUM_HELD * NUM_ROUNDS
        assert [record.getMessage() for record in caplog.records] == []
