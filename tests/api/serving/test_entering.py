"""Requests that are still on their way in: how they are ended, bounded for each key, and what they cost."""

import asyncio
import io
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.keys import add_key
from quire.api.access.quotas import Bucket
from quire.core.scheduling.waiting_queue import QueueConfig, WaitingQueue
from quire.errors import DrainingError
from quire.observe import access_log
from tests.api.watch.test_watching import value
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import PacedRunner, paced_talker

COMPLETE = "/v1/completions"
BODY = {"model": "oracle", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The log, and everything as it was afterwards."""
    root = logging.getLogger()
    before, level, out = root.handlers[:], root.level, io.StringIO()
    access_log.configure_logging("json", stream=out)
    yield out
    root.handlers[:] = before
    root.setLevel(level)


def half(here: LiveServer, path: str = COMPLETE, key: str = "", **more: Any) -> tuple[socket.socket, bytes]:
    """A request whose body is not all there, and the rest of it."""
    body = json.dumps({**BODY, **more}).encode()
    wire = socket.create_connection(("127.0.0.1", here.port), timeout=PATIENCE_S)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\nconnection: close\r\n"
    wire.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body[:10])
    return wire, body[10:]


def heard(wire: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    parts = []
    with wire:
        while part := wire.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("path", [COMPLETE, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_body_half_sent_when_the_drain_ends_gets_its_end(written: io.StringIO, path: str, streams: bool) -> None:
    with house(drain_s=0.1) as here:
        wire, _ = half(here, path, stream=streams)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        data = heard(wire)
        here.wait_for_end()
    assert data.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"server_draining"' in data
    assert b"retry-after" in data
    assert b"text/plain" not in data
    assert here.results == [1]
    assert "trace" not in written.getvalue()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_body_completed_after_the_drain_has_ended_gets_its_end(written: io.StringIO, streams: bool) -> None:
    with house(drain_s=0.0) as here:
        wire, rest = half(here, stream=streams)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        data = b""
        while b'"code"' not in data and (part := wire.recv(65536)):
            data += part
        with wire, suppress(OSError):  # nobody may be there to take it
            wire.sendall(rest)
        here.wait_for_end()
    assert data.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"server_draining"' in data
    assert "trace" not in written.getvalue()


def test_a_body_completed_while_the_server_drains_is_answered() -> None:
    with house(drain_s=60.0) as here:
        wire, rest = half(here)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        here.loop.call_soon_threadsafe(here.shutdown.request)
        wire.sendall(rest)
        assert b" 200 " in heard(wire)


def test_a_request_that_is_entering_can_be_ended_by_the_operator() -> None:
    with house() as here:
        wire, _ = half(here)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        ((record, _),) = here.admission.open_requests.values()
        assert record.state == "entering"
        for words in ("the operator ended this request", "and once more"):
            here.loop.call_soon_threadsafe(record.end, DrainingError(words))
        data = heard(wire)
        assert b" 503 " in data
        assert b"the operator ended this request" in data
        here.wait_until_free()


def test_a_request_an_engine_has_not_taken_yet_can_be_ended() -> None:
    opened, runner = paced_talker(max_running=1)
    with house(models={"oracle": opened}) as here:
        running = here.connection()
        running.request("POST", COMPLETE, json.dumps({**BODY, "max_tokens": 50}))
        assert runner.is_waiting.wait(60)
        asked = here.connection()
        asked.request("POST", COMPLETE, json.dumps({**BODY, "prompt": ["one", "two", "three"]}))
        here.wait_until(lambda: len(here.admission.open_requests) == 2)
        record = list(here.admission.open_requests.values())[1][0]
        here.loop.call_soon_threadsafe(record.end, DrainingError("the operator ended this request"))
        response = asked.getresponse()
        assert (response.status, b"the operator ended" in response.read()) == (503, True)
        runner.let_go()
        assert running.getresponse().status == 200
        running.close()
        asked.close()
        here.wait_until_free()


def test_half_bodies_of_one_key_do_not_shut_out_another(tmp_path: Path) -> None:
    greedy, modest = (add_key(tmp_path / "keys.json", name) for name in ("greedy", "modest"))
    with house(keys_file=tmp_path / "keys.json", settings=AdmissionSettings(max_open_requests=8)) as here:
        held = [half(here, key=greedy)[0] for _ in range(2)]
        here.wait_until(lambda: len(here.admission.open_requests) == 2)
        over = [half(here, key=greedy)[0] for _ in range(10)]
        for wire in over:
            data = heard(wire)
            assert b" 429 " in data
            assert b"retry-after" in data
        assert here.post(COMPLETE, BODY, x_api_key=modest).status == 200
        for wire in held:
            wire.close()
        here.wait_until_free()
        assert here.post(COMPLETE, BODY, x_api_key=greedy).status == 200


def test_without_keys_all_places_may_be_entering() -> None:
    with house(settings=AdmissionSettings(max_open_requests=4)) as here:
        held = [half(here) for _ in range(4)]
        here.wait_until(lambda: len(here.admission.open_requests) == 4)
        assert here.post(COMPLETE, BODY).status == 503
        for wire, rest in held:
            wire.sendall(rest)
            assert b" 200 " in heard(wire)


def test_tokenizing_takes_a_place_and_counts_as_a_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    few, one = add_key(keys, "few", requests_per_minute=2), add_key(keys, "one", concurrent=1)
    with house(keys_file=keys) as here:
        asked = {"model": "oracle", "prompt": "hello"}
        first = here.post("/tokenize", asked, x_api_key=few)
        assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        assert here.post("/detokenize", {"model": "oracle", "tokens": [40]}, x_api_key=few).status == 200
        over = here.post("/tokenize", asked, x_api_key=few)
        assert (over.status, over.code) == (429, "rate_limit_exceeded")
        wire, _ = half(here, key=one)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        assert here.post("/tokenize", asked, x_api_key=one).status == 429
        wire.close()
        here.wait_until_free()
        here.loop.call_soon_threadsafe(here.shutdown.request)
        here.wait_until(lambda: here.admission.is_draining)
    with house(settings=AdmissionSettings(max_open_requests=1)) as here:
        wire, _ = half(here)
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        assert here.post("/tokenize", asked).status == 503
        wire.close()
        here.wait_until_free()


def test_a_bucket_takes_back_what_was_taken_for_nothing() -> None:
    bucket = Bucket(60)
    bucket.take(60, 1000.0)
    bucket.give_back(10)
    assert (bucket.available(1000.0), bucket.available(2000.0)) == (10, 60)
    bucket.give_back(50)
    assert bucket.available(1000.0) == 60


def _refusals(here: LiveServer, runner: PacedRunner, secret: str, count: int) -> list[Any]:
    """Answers of a server whose engine lets nobody in, while it steps."""
    got: list[Any] = []
    asking = threading.Thread(
        target=lambda: got.extend(here.post(COMPLETE, BODY, x_api_key=secret) for _ in range(count))
    )
    asking.start()
    while asking.is_alive():
        runner.allow(1)
        asking.join(0.05)  # seldom, so that those inside are not at their ends before the answers come
    return got


def test_what_the_engine_turns_away_costs_the_key_nothing_and_is_no_latency(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", requests_per_minute=6, tokens_per_minute=60)
    opened, runner = paced_talker(max_running=1)
    opened.engine.scheduler.queue = WaitingQueue(QueueConfig(max_requests=1, class_reserve=0.0))
    with house(models={"oracle": opened}, keys_file=tmp_path / "keys.json") as here:
        open_requests = []
        for at in range(2):
            connection = here.connection()
            asked = {**BODY, "prompt": f"question {at}", "max_tokens": 400}
            connection.request("POST", COMPLETE, json.dumps(asked), {"x-api-key": secret})
            open_requests.append(connection)
            here.wait_until(lambda: len(here.admission.open_requests) == len(open_requests))
            while len(opened.engine.scheduler.live) < len(open_requests):
                runner.allow(1)  # one step at a time: the answers inside must not come to their ends
                here.run(lambda: _sleep(0.05))
        quota = next(iter(here.admission.open_requests.values()))[1].quota
        assert quota.requests is not None
        assert quota.tokens is not None

        requests, tokens = quota.requests, quota.tokens

        def spent() -> tuple[float, float]:
            """On requests, and on tokens beside those that are being produced; one a second refills."""
            produced = sum(record.num_output_tokens for record, _ in here.admission.open_requests.values())
            return requests.full_at_s, tokens.full_at_s - produced

        before = spent()
        got = _refusals(here, runner, secret, 5)
        assert {reply.status for reply in got} <= {429, 503}
        here.wait_until(lambda: spent() == pytest.approx(before, abs=1e-6), 20)
        runner.let_go()
        for connection in open_requests:
            assert connection.getresponse().status == 200
            connection.close()
        here.wait_until_free()
        page = here.get("/metrics", x_api_key=secret).data.decode()
    assert value(page, "request_queue_time_seconds_count") == 2


def test_streams_tell_what_a_key_has_left(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", requests_per_minute=10, tokens_per_minute=1000)
    with house(keys_file=tmp_path / "keys.json") as here:
        streamed = here.post(COMPLETE, {**BODY, "stream": True}, x_api_key=secret)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "9"
    assert streamed.headers["x-ratelimit-limit-tokens"] == "1000"


def _lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [one for one in map(json.loads, written.getvalue().splitlines()) if one["from"] == "quire.access"]


def test_a_cut_request_and_one_that_left_the_queue_log_what_they_took(written: io.StringIO) -> None:
    opened, runner = paced_talker(max_running=1)
    with house(models={"oracle": opened}) as here:
        running, waiting = here.connection(), here.connection()
        running.request("POST", COMPLETE, json.dumps({**BODY, "max_tokens": 400, "stream": True}))
        assert runner.is_waiting.wait(60)
        waiting.request("POST", COMPLETE, json.dumps({**BODY, "prompt": "another"}))
        here.wait_until(lambda: len(here.admission.open_requests) == 2)
        for _ in range(30):
            runner.allow(1)
            assert runner.is_waiting.wait(60)
        here.wait_until(lambda: here.states() == ["running", "waiting"])
        here.run(lambda: _sleep(0.3))
        waiting.close()
        here.wait_until(lambda: len(here.admission.open_requests) == 1)
        running.close()
        here.wait_until(lambda: not here.admission.open_requests)
        runner.let_go()
        here.wait_until_free()
        here.wait_until(lambda: len(_lines(written)) == 2)
    left, cut = _lines(written)
    assert (left["status"], cut["status"]) == (499, 499)
    assert left["queue_s"] >= 0.3
    assert left["ttft_s"] is None
    assert cut["output_tokens"] > 10
    assert 0 < cut["tokens_per_s"] <= cut["output_tokens"] / 0.3


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
