"""One request over HTTP: what comes back, and what goes wrong."""

import asyncio
import json
import socket

import pytest

from benchmarks.null_server import Manner, null_server
from quire.bench.calls import HttpCall
from quire.bench.http_client import Client, ModelCard, RefusedError
from quire.bench.outcome import Outcome
from quire.errors import ConfigError
from quire.http_client import ServerAddress
from tests.support.errors import raises_code
from tests.support.servers.scripted_server import OK, scripted

CALL = HttpCall("r1", "all", "/v1/completions", b'{"prompt": [1, 2, 3], "max_tokens": 4}', 3)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "a"}])
LAST = event(choices=[{"text": "b", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def asked(*pieces: bytes, timeout_s: float = 60.0) -> Outcome:
    async def send() -> Outcome:
        async with scripted(pieces) as url, Client(ServerAddress.parse(url), timeout_s) as client:
            return await client.send(CALL)

    return asyncio.run(send())


def test_an_answer_is_stamped_and_counted() -> None:
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5})
    outcome = asked(OK, TOKEN, LAST, usage, DONE)
    assert (outcome.error, outcome.text, outcome.finish_reason) == (None, "ab", "length")
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (9, 5, None)
    assert len(outcome.token_s) == 2
    assert outcome.sent_s <= outcome.token_s[0] <= outcome.token_s[1] <= outcome.ended_s


def test_without_usage_events_are_counted_and_prompts_are_as_meant() -> None:
    outcome = asked(OK, TOKEN, LAST)
    assert (outcome.error, outcome.prompt_tokens, outcome.output_tokens) == (None, 3, 2)


@pytest.mark.parametrize(
    ("pieces", "kind", "told"),
    [
        ((b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull",), "http 503", "full"),
        ((OK, TOKEN), "broken", ""),
        ((OK, TOKEN, event(error={"message": "out of memory"}), DONE), "server", "out of memory"),
        ((OK, b"data: {not json\n\n"), "unreadable", "expected an event"),
        ((OK, DONE), "empty", ""),
        ((b"",), "broken", "closed the connection before a response"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + TOKEN,), "broken", ""),
    ],
)
def test_whatever_goes_wrong_is_told_by_its_kind(pieces: tuple[bytes, ...], kind: str, told: str) -> None:
    outcome = asked(*pieces)
    assert outcome.error == kind
    assert told in outcome.detail.lower()


def test_what_a_stranger_says_cannot_steer_a_terminal() -> None:
    outcome = asked(b"HTTP/1.1 500 No\r\nContent-Length: 9\r\n\r\nno\x1b[31m\r\n")
    assert outcome.detail == "no [31m"


def test_a_server_that_is_not_there_is_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def send() -> Outcome:
            async with Client(ServerAddress.parse(url)) as client:
                return await client.send(CALL)

        assert asyncio.run(send()).error == "connect"


def test_a_server_that_never_answers_is_a_timeout() -> None:
    async def send() -> Outcome:
        async with null_server(Manner(first_s=60.0)) as url, Client(ServerAddress.parse(url), 0.05) as client:
            return await client.send(CALL)

    assert asyncio.run(send()).error == "timeout"


def test_the_model_is_the_first_one_listed_unless_one_is_named() -> None:
    async def cards() -> tuple[ModelCard, ModelCard]:
        async with null_server(Manner()) as url, Client(ServerAddress.parse(f"{url}/v1/")) as client:
            return await client.ready(1.0), await client.ready(1.0, "other")

    assert asyncio.run(cards()) == (ModelCard("null", 8192), ModelCard("other", None))


def test_a_server_that_is_not_ready_is_told_with_what_to_do() -> None:
    async def wait() -> None:
        async with (
            scripted([b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"]) as url,
            Client(ServerAddress.parse(url)) as client,
        ):
            await client.ready(0.0)

    with raises_code(ConfigError, "server_unreachable") as refused:
        asyncio.run(wait())
    assert isinstance(refused.value.__cause__, RefusedError)
    assert refused.value.__cause__.status == 401


def test_a_key_is_sent_and_never_shown() -> None:
    server = ServerAddress.parse("http://localhost:1", key="secret")
    assert "secret" not in repr(server)


def test_an_address_without_a_scheme_is_refused() -> None:
    with raises_code(ConfigError, "invalid_server_address"):
        ServerAddress.parse("localhost:8000")
