"""Finding 10: the bytes of a body were counted as those of the next request's head, and the answer before was lost."""

import json
import socket
from contextlib import suppress

from quire.api.http.limits import MAX_HEAD_BYTES
from tests.support.servers.local_api import house
from tests.support.servers.talkers import paced_talker

HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def heard(wire: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    parts = []
    with suppress(ConnectionResetError):
        while part := wire.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_a_body_and_the_beginning_of_the_next_head_in_one_read_are_both_answered() -> None:
    body = json.dumps({"model": "oracle", "prompt": "x", "max_tokens": 1, "user": "x" * 90_000}).encode()
    with house() as here, socket.create_connection(("127.0.0.1", here.port), timeout=30) as wire:
        # All that is written before the server looks is there in few reads; the last of them ends inside a head.
        wire.sendall(HEAD % (b"/v1/completions", len(body)) + body + HEALTH[:20])
        here.wait_until(lambda: not here.admission.open_requests, 30)
        wire.sendall(HEALTH[20:])
        told = heard(wire)
    assert b" 431 " not in told
    assert told.count(b"HTTP/1.1 200 ") == 2


def test_a_head_that_is_too_large_is_told_so_after_the_answer_before_it() -> None:
    opened, runner = paced_talker()
    body = b'{"model": "oracle", "prompt": "x", "max_tokens": 1}'
    with (
        house(models={"oracle": opened}) as here,
        socket.create_connection(("127.0.0.1", here.port), timeout=30) as wire,
    ):
        wire.sendall(HEAD % (b"/v1/completions", len(body)) + body)
        assert runner.is_waiting.wait(30)
        wire.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n")
        runner.let_go()
        told = heard(wire)
        here.wait_until_free(30)
    first, _, rest = told.partition(b"\r\n")
    assert first == b"HTTP/1.1 200 OK"
    assert b"HTTP/1.1 431 " in rest
