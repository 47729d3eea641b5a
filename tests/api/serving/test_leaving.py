"""Clients that go away, at every moment, and clients that do not read: nothing is held for them, nobody waits."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house, read_some
from tests.support.servers.talkers import PacedRunner, paced_talker, talker

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def paced() -> Iterator[tuple[LiveServer, PacedRunner]]:
    """A server whose model makes a step when it is told to."""
    opened, runner = paced_talker(max_running=2)
    with house(models={"oracle": opened}) as here:
        yield here, runner
        runner.let_go()


def ask(here: LiveServer, **more: Any) -> HTTPConnection:
    """Send a request and wait for nothing."""
    connection = here.connection()
    asked = {"model": "oracle", "prompt": "hello", "max_tokens": 200, "temperature": 0.0, "ignore_eos": True, **more}
    connection.request("POST", COMPLETE, json.dumps(asked).encode())
    return connection


def hang_up(connection: HTTPConnection, *, with_reset: bool = False) -> None:
    wire = connection.sock
    assert wire is not None
    if with_reset:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


@pytest.mark.parametrize("with_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_client_that_leaves_in_prefill_or_decode_holds_nothing(
    paced: tuple[LiveServer, PacedRunner], streams: bool, num_steps: int, with_reset: bool
) -> None:
    here, runner = paced
    connection = ask(here, stream=streams)
    assert runner.is_waiting.wait(60)
    runner.allow(num_steps)
    assert runner.is_waiting.wait(60)
    hang_up(connection, with_reset=with_reset)
    here.wait_until(lambda: not here.admission.open_requests)
    runner.let_go()
    here.wait_until_free()
    assert here.opened["oracle"].engine.scheduler.stats.num_output_tokens < 20


def test_a_client_that_leaves_the_queue_is_forgotten(paced: tuple[LiveServer, PacedRunner]) -> None:
    here, runner = paced
    running = [ask(here, stream=True, prompt=f"one {at}") for at in range(2)]
    assert runner.is_waiting.wait(60)
    waiting = ask(here, prompt="another", n=2)
    here.wait_until(lambda: len(here.admission.open_requests) == 3)
    hang_up(waiting)
    here.wait_until(lambda: len(here.admission.open_requests) == 2)
    runner.let_go()
    for connection in running:
        assert connection.getresponse().read().endswith(b"[DONE]\n\n")
        connection.close()
    here.wait_until_free()
    assert here.opened["oracle"].engine.scheduler.stats.num_output_tokens == 400


def test_a_client_that_leaves_before_its_body_is_there_takes_no_place(here: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", here.port)) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
    here.wait_until(lambda: not here.admission.open_requests)


def test_a_client_that_asked_twice_at_once_and_leaves_ends_both(paced: tuple[LiveServer, PacedRunner]) -> None:
    here, runner = paced
    body = json.dumps({"model": "oracle", "prompt": "hello", "max_tokens": 200, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", here.port)) as wire:
        wire.sendall((head + body) * 2)
        assert runner.is_waiting.wait(60)
    here.wait_until(lambda: not here.admission.open_requests)
    runner.let_go()
    here.wait_until_free()


def test_two_requests_on_one_connection_are_answered_in_their_order(here: LiveServer) -> None:
    bodies = [json.dumps({"model": "oracle", "prompt": f"hello {at}", "max_tokens": 9}).encode() for at in range(2)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", here.port)) as wire:
        wire.sendall(b"".join(head % len(body) + body for body in bodies))
        data = b""
        while data.count(b'"usage"') < 2:
            data += wire.recv(65536)
    assert data.count(b"HTTP/1.1 200") == 2


def slow_connection(here: LiveServer, **more: Any) -> socket.socket:
    """A stream of much text to somebody with a small window."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", here.port))
    asked = {"model": "oracle", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 480, "stream": True,
             "logprobs": True, "top_logprobs": 20, "ignore_eos": True, **more}  # fmt: skip
    body = json.dumps(asked).encode()
    wire.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    return wire


@pytest.mark.parametrize("who", ["asgi", "http.protocol"])
def test_a_reader_that_takes_nothing_is_cut_and_others_are_not(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that waits too long, or a look at the connection: whoever sees it first, the log says why."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("quire.api.asgi.write_access", lines.append)
    monkeypatch.setattr("quire.api.http.protocol.CHECK_S", 0.05)
    monkeypatch.setattr(f"quire.api.{who}.STUCK_S", 0.3)
    monkeypatch.setattr("quire.api.http.protocol.WRITE_BUFFER_BYTES", 4096)
    with house(models={"oracle": talker(num_blocks=2048)}, send_buffer_bytes=65536) as here:
        slow = [slow_connection(here, seed=at) for at in range(6)]
        here.wait_until(lambda: len(here.admission.open_requests) == 6)
        quick = here.post(COMPLETE, {"model": "oracle", "prompt": "hello", "max_tokens": 100, "stream": True})
        assert len(quick.events) >= 1
        here.wait_until_free()
        ends = [_drained(wire) for wire in slow]
    assert not any(b"[DONE]" in data for data in ends)
    assert sorted(line.get("error", "") for line in lines) == ["", *["reader_too_slow"] * 6]


def _drained(wire: socket.socket) -> bytes:
    parts = []
    wire.settimeout(PATIENCE_S)
    try:
        while part := wire.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    finally:
        wire.close()
    return b"".join(parts)


def test_a_reader_that_was_away_for_a_moment_gets_everything_in_fewer_pieces(
    paced: tuple[LiveServer, PacedRunner],
) -> None:
    here, runner = paced
    connection = ask(here, stream=True, max_tokens=300, seed=1)
    runner.let_go()
    here.wait_until(
        lambda: all(
            record.handles and record.handles[0].reply.is_done for record, _ in here.admission.open_requests.values()
        )
    )
    data = connection.getresponse().read()
    connection.close()
    whole = here.post(
        COMPLETE, {"model": "oracle", "prompt": "hello", "max_tokens": 300, "temperature": 0.0, "ignore_eos": True}
    ).json
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in data.decode().split("\n\n")[:-2]]
    assert "".join(texts) == whole["choices"][0]["text"]


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(here: LiveServer) -> None:
    tasks_before, threads_before = here.num_tasks(), threading.active_count()

    def record(at: int) -> None:
        connection = ask(here, prompt=f"question {at}", stream=at % 3 != 0, n=1 + at % 2)
        if at % 4 == 0:
            hang_up(connection, with_reset=at % 8 == 0)
            return
        response = connection.getresponse()
        if at % 4 == 1 and at % 3 != 0:
            read_some(response, 1)
            hang_up(connection)
        else:
            assert response.read()
        connection.close()

    crowd = [threading.Thread(target=record, args=(at,)) for at in range(120)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    here.wait_until_free()
    here.wait_until(lambda: here.num_tasks() <= tasks_before + 1)  # and the one that looks
    assert threading.active_count() <= threads_before + 10
