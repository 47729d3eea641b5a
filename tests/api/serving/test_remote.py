"""`quire chat --url` against servers that behave badly, and a person who does not want to wait."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.chat.remote import Remote
from quire.client.reply.outputs import Completion
from quire.client.request.params import SamplingParams
from quire.errors import ConfigError, QuireError
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.scripted_server import OK
from tests.support.servers.talkers import paced_talker

HELLO = [{"role": "user", "content": "hello"}]
CHUNK = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "half"}}]}).encode() + b"\n\n"


@contextmanager
def scripted(answer: bytes) -> Iterator[str]:
    """A server that says these bytes to whoever asks, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    wire, _ = listener.accept()
                    wire.recv(65536)
                    wire.sendall(answer)
                    wire.shutdown(socket.SHUT_WR)
                    while wire.recv(65536):  # a socket closed with words unread is reset, and what it said is lost
                        pass
                    wire.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def said(url: str, is_stopped: Any = lambda: False) -> list[Any]:
    return list(Remote(url, "oracle").stream_chat(HELLO, SamplingParams(max_tokens=200), is_stopped))


def test_a_stream_that_ends_without_its_last_word_is_no_answer() -> None:
    with scripted(OK + CHUNK) as url, raises_code(QuireError, "internal_error"):
        said(url)
    with scripted(OK + CHUNK + b"data: [DONE]\n\n") as url:
        assert said(url)[-1].text == "half"
    with scripted(OK + CHUNK + b'data: {"cho') as url, pytest.raises(QuireError):
        said(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:eighty",
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "http://[::1",
        "http://",
    ],
)
def test_an_address_that_is_none_is_said_to_be(url: str) -> None:
    with raises_code(ConfigError, "invalid_server_address"):
        Remote.connect(url, None, None)
    assert isinstance(CliRunner().invoke(app, ["chat", "--url", url]).exception, ConfigError)


def test_a_server_that_reports_progress_is_asked_for_it_and_others_are_not() -> None:
    counts: list[tuple[int, int]] = []
    long = [{"role": "user", "content": "the cat sat on the mat " * 30}]
    with house() as here:
        remote = Remote.connect(here.url, None, None)
        assert remote.reports_progress
        params = SamplingParams(max_tokens=2)
        *_, completion = remote.stream_chat(long, params, lambda: False, lambda *pair: counts.append(pair))
        assert isinstance(completion, Completion)
        total = len(completion.prompt_token_ids)
        assert counts[-1] == (total, total)
        assert counts == sorted(counts)
        counts.clear()
        list(replace(remote, reports_progress=False).stream_chat(long, params, bool, lambda *pair: counts.append(pair)))
        assert not counts


@pytest.fixture
def waiting() -> Iterator[LiveServer]:
    """A server whose model does not move."""
    opened, runner = paced_talker(max_running=1)
    with house(models={"oracle": opened}) as here:
        yield here
        runner.let_go()
        here.wait_until_free()


def test_whoever_stops_while_waiting_in_the_queue_leaves_at_once(waiting: LiveServer) -> None:
    stopped = threading.Event()
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(said(waiting.url, stopped.is_set)))
    asking.start()
    waiting.wait_until(lambda: len(waiting.admission.open_requests) == 1)
    stopped.set()
    asking.join(60)  # nothing else would end it: the model does not move
    assert not asking.is_alive()
    (completion,) = got
    assert isinstance(completion, Completion)
    assert completion.finish_reason == "cancelled"
    waiting.wait_until(lambda: not waiting.admission.open_requests)
