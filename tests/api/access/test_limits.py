"""Each bound of `limits.py` that is about time or connections, met by a client that goes beyond it."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.api.http import limits
from quire.api.http.acceptor import allow_many_connections, max_connections
from quire.api.listening import listen
from quire.api.serving import Plan, run
from quire.client.engines.served import ServedModel
from quire.config import OnDemandModel, Settings, load_settings
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.served import served
from tests.support.servers.talkers import paced_talker

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


def heard(wire: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    wire.settimeout(PATIENCE_S)
    parts = []
    try:
        while part := wire.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def connected(here: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", here.port), timeout=PATIENCE_S)


def test_the_bounds_are_those_of_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/keys-and-limits.md").read_text()
    for words in (
        f"{limits.MAX_BODY_BYTES // 10**6} MB of JSON, {limits.MAX_JSON_DEPTH} deep, {limits.MAX_JSON_LISTS:,} lists",
        f"objects, sent within {limits.BODY_S:g} s",
        f"{limits.MAX_HEAD_BYTES // 1024} KiB and {limits.MAX_HEADERS} headers, sent within {limits.HEAD_S:g} s",
        f"| prompts in one request | {limits.MAX_PROMPTS} |",
        f"| answers (`n`) | {limits.MAX_ANSWERS} |",
        f"| stop strings | {limits.MAX_STOPS} of up to {limits.MAX_STOP_CHARS:,} characters |",
        f"| log-probabilities | {limits.MAX_LOGPROBS} alternatives; {limits.MAX_ANSWER_LOGPROBS:,} in one answer ",
        f"| messages | {limits.MAX_MESSAGES:,} |",
        f"above {limits.MAX_PENDING} unsent chunks, chunks are merged; above {limits.MAX_PENDING_BYTES >> 20} MiB, ",
        f"after {limits.STUCK_S:g} s without progress, the connection is closed",
    ):
        assert words in guide, words


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.http.protocol.HEAD_S", 0.1)
    with house() as here, connected(here) as silent, connected(here) as dripping:
        dripping.sendall(HEAD)
        assert heard(silent) == b""
        assert heard(dripping) == b""
        monkeypatch.undo()
        assert here.get("/health").status == 200


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.http.body.BODY_S", 0.1)
    with house() as here, connected(here) as wire:
        wire.sendall(HEAD + b"connection: close\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in heard(wire)
        assert not here.admission.open_requests


def test_connections_are_bounded_and_those_without_a_request_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.http.acceptor.max_connections", lambda: 2)
    opened, runner = paced_talker()
    with house(models={"oracle": opened}) as here, connected(here) as idle, connected(here) as busy:
        body = b'{"model": "oracle", "prompt": "x", "max_tokens": 2}'
        busy.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert runner.is_waiting.wait(20)
        with connected(here) as asking:
            asking.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert heard(idle) == b""
            here.wait_until(lambda: len(here.admission.open_requests) == 2, 20)
            with connected(here) as late:
                late.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                assert len(here.admission.open_requests) == 2, "both places have a request: the third waits"
                runner.let_go()
                for wire in (busy, asking):
                    assert wire.recv(12) == b"HTTP/1.1 200"
                    wire.close()
                assert b" 200 " in heard(late)
        here.wait_until_free(20)


@pytest.mark.parametrize(
    ("limit", "count"),
    [(resource.RLIM_INFINITY, 8192), (65536, 8192), (8448, 8192), (8447, 8191), (1024, 768), (512, 256), (160, 80)],
)
def test_connections_leave_descriptors_for_the_server_s_own_files(
    limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    assert max_connections() == count
    warning = allow_many_connections()
    assert warning is None if count == limits.MAX_CONNECTIONS else f"{count:,} connections" in str(warning)


def test_an_idle_connection_is_closed_and_answers_nobody_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.server.KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr("quire.api.asgi.STUCK_S", 0.2)
    with house(send_buffer_bytes=4096) as here:
        with connected(here) as wire:
            wire.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in heard(wire)
        num_tasks = here.num_tasks()
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", here.port))
        wire.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40)
        here.wait_until(lambda: here.num_tasks() <= num_tasks + 1)
        wire.close()


def test_a_request_that_takes_too_long_ends_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.dialects.resolved_request.REQUEST_S", 0.0)
    with house() as here:
        late = here.post("/v1/completions", {"prompt": "hello", "max_tokens": 100})
        assert (late.status, late.code) == (503, "request_timeout")
        assert "retry-after" in late.headers


def test_more_tokens_than_any_text_has_are_not_made_text(here: LiveServer) -> None:
    assert (
        here.post("/detokenize", {"model": "oracle", "tokens": [40] * (limits.MAX_DETOKENIZE_TOKENS + 1)}).status == 400
    )


def settings(folder: Path, port: int = 0) -> Settings:
    flags = {"port": str(port), "admin_socket": str(folder / "run" / "a.sock"), "keys_file": str(folder / "keys.json")}
    return load_settings(dict(flags), environ={})


def kept(name: str) -> list[OnDemandModel]:
    return [OnDemandModel(name, "x", is_kept=True)]


def test_models_are_listed_while_one_is_still_loading_and_who_asks_it_waits(tmp_path: Path) -> None:
    told: list[str] = []
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]

    async def live() -> tuple[int, list[int]]:
        loaded, statuses = asyncio.Event(), []

        @asynccontextmanager
        async def slow(_model: OnDemandModel, _tell: Any) -> AsyncIterator[ServedModel]:
            await loaded.wait()
            async with served() as engine_client:
                yield engine_client

        running = asyncio.ensure_future(run(Plan(kept("oracle"), settings(tmp_path, port)), told.append, slow))
        path = str(tmp_path / "run" / "a.sock")
        while not Path(path).exists() and not running.done():
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for route in ("/v1/models", "/ready"):
                async with session.get(route) as response:
                    statuses.append(response.status)
            waiting = asyncio.ensure_future(session.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
            loaded.set()
            statuses.append((await waiting).status)
            while not told and not running.done():
                await asyncio.sleep(0.01)
            async with session.get("/ready") as response:
                statuses.append(response.status)
        os.kill(os.getpid(), signal.SIGTERM)
        return await running, statuses

    assert asyncio.run(live()) == (0, [200, 503, 200, 200])
    assert any(line.startswith("listening on http://127.0.0.1:") for line in told)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    @asynccontextmanager
    async def broken(_model: OnDemandModel, _tell: Any) -> AsyncIterator[ServedModel]:
        raise CheckpointError("there is no such model", code="no_such_model")
        yield

    with raises_code(CheckpointError, "no_such_model"):
        asyncio.run(run(Plan(kept("x"), settings(tmp_path)), print, broken))
    (tmp_path / "keys.json").write_text("nonsense")
    (tmp_path / "keys.json").chmod(0o600)
    with raises_code(ConfigError, "invalid_config"):
        asyncio.run(run(Plan(kept("x"), settings(tmp_path)), print, broken))


def test_a_server_that_is_ended_while_it_loads_does_not_wait_for_the_model(tmp_path: Path) -> None:
    async def live() -> int:
        began = asyncio.Event()

        @asynccontextmanager
        async def endless(_model: OnDemandModel, _tell: Any) -> AsyncIterator[ServedModel]:
            began.set()
            await asyncio.Event().wait()
            yield served()

        running = asyncio.ensure_future(run(Plan(kept("x"), settings(tmp_path)), print, endless))
        await began.wait()
        signal.raise_signal(signal.SIGTERM)
        return await asyncio.wait_for(running, 60)

    assert asyncio.run(live()) == 0


def read_until_closed(wire: socket.socket) -> None:
    """Fails unless the other side hangs up sooner than its own patience ends."""
    wire.settimeout(PATIENCE_S)
    assert limits.KEEP_ALIVE_S > 60
    with suppress(ConnectionResetError):
        while wire.recv(65536):
            pass


@pytest.mark.parametrize(
    "words",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n\r\n",
        b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nx",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
    ids=["an empty line", "a body that never comes", "nothing more"],
)
def test_a_connection_that_is_held_for_nothing_is_cut(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.api.http.protocol.KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr("quire.api.http.protocol.CHECK_S", 0.05)
    monkeypatch.setattr("quire.api.http.protocol.HEAD_S", 600.0)  # it must not be cut for another reason
    with house() as here, socket.create_connection(("127.0.0.1", here.port)) as wire:
        wire.sendall(words)
        read_until_closed(wire)


def test_more_requests_sent_early_than_anybody_needs_end_the_connection() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}) as here, socket.create_connection(("127.0.0.1", here.port)) as wire:
        body = b'{"model": "oracle", "prompt": "x", "max_tokens": 2}'
        one = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        for _ in range(limits.MAX_PIPELINED + 3):
            with suppress(OSError):
                wire.sendall(one)
        read_until_closed(wire)
        runner.let_go()
        here.wait_until_free()


def test_a_client_that_asked_early_and_left_is_seen() -> None:
    opened, runner = paced_talker()
    with house(models={"oracle": opened}) as here:
        body = b'{"model": "oracle", "prompt": "x", "max_tokens": 100}'
        with socket.create_connection(("127.0.0.1", here.port)) as wire:
            wire.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert runner.is_waiting.wait(60)
            wire.sendall(HEAD + b"content-length: 5\r\n\r\n")
            here.wait_until(lambda: bool(here.admission.open_requests))
        here.wait_until(lambda: not here.admission.open_requests)
        runner.let_go()
        here.wait_until_free()
