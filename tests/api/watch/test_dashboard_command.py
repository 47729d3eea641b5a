"""`quire dashboard`: who gets through the loopback port to the operator's socket, and what of it."""

import http.client
import json
import signal
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.api.access.keys import add_key
from quire.api.web_page import DASHBOARD, POLICY
from quire.cli import app
from quire.cli.watch import dashboard_server as module
from quire.cli.watch.dashboard_server import DashboardServer
from quire.cli.watch.watch_source import WatchSource
from quire.errors import ConfigError
from tests.api.serving.test_process import started
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import Reply
from tests.support.servers.watch_stand_in import Answer, StandIn, event, snapshot, stand_in

BLOCK = b'{"block_id": 7}'


def answer(path: str, headers: dict[str, str]) -> Answer:
    """What a server's operator hears."""
    return (200, BLOCK) if path.startswith("/blocks/") else [event(snapshot()), event(snapshot(at_s=1001.0))]


@contextmanager
def served(source: WatchSource) -> Iterator[DashboardServer]:
    with DashboardServer(source) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,), name="dashboard")
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DashboardServer, StandIn]]:
    """A server with its socket, and the dashboard before it."""
    path = tmp_path_factory.mktemp("run") / "admin.sock"
    with stand_in(answer, path) as behind, served(WatchSource(behind.url, path)) as serving:
        yield serving, behind


def ask(serving: DashboardServer, path: str, method: str = "GET", **headers: str) -> Reply:
    with closing(http.client.HTTPConnection("127.0.0.1", serving.server_address[1], timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        with closing(connection.getresponse()) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def bearer(serving: DashboardServer) -> dict[str, str]:
    return {"authorization": f"Bearer {serving.token}"}


def test_the_page_is_served_as_the_server_does_and_needs_no_token(both: tuple[DashboardServer, StandIn]) -> None:
    for name in DASHBOARD.names:
        reply = ask(both[0], DASHBOARD.path_of(name))
        assert (reply.status, reply.data) == (200, DASHBOARD.read(name))
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_with_the_token_the_stream_and_blocks_come_through(both: tuple[DashboardServer, StandIn]) -> None:
    serving, behind = both
    behind.asked.clear()
    reply = ask(serving, "/v1/admin/watch?model=a%20b%2F", **bearer(serving), cookie="x=1", x_api_key="mine")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream")
    assert reply.data == event(snapshot()) + event(snapshot(at_s=1001.0))
    assert ask(serving, "/v1/admin/blocks/7", **bearer(serving)).data == BLOCK
    assert [(method, path) for method, path, _ in behind.asked] == [
        ("GET", "/watch?model=a%20b%2F"), ("GET", "/blocks/7"),
    ]  # fmt: skip
    for _, _, headers in behind.asked:
        assert set(headers) <= {"host", "accept-encoding"}, "nothing of the browser's reaches the operator's socket"


@pytest.mark.parametrize(
    "presented", ["", "Bearer", "Bearer ", "Bearer x", "Basic {}", "Bearer {}x", "Bearer \xe9", "{}"]
)
def test_without_the_token_nothing_is_forwarded(both: tuple[DashboardServer, StandIn], presented: str) -> None:
    serving, behind = both
    behind.asked.clear()
    headers = {"authorization": presented.format(serving.token)} if presented else {}
    for path in ("/v1/admin/watch", "/v1/admin/blocks/7", "/v1/admin/drain", "/stats", "/"):
        refused = ask(serving, path, x_api_key=serving.token, cookie=f"key={serving.token}", **headers)
        assert (refused.status, refused.code) == (401, "invalid_api_key")
        assert serving.token not in refused.data.decode()
    assert ask(serving, f"/v1/admin/watch?key={serving.token}").status == 401
    assert behind.asked == []


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "X"])
def test_nothing_but_get_reaches_the_socket(both: tuple[DashboardServer, StandIn], method: str) -> None:
    serving, behind = both
    behind.asked.clear()
    for path in ("/v1/admin/watch", "/v1/admin/drain", "/v1/admin/requests/req_1", "/v1/admin/cache/clear"):
        assert ask(serving, path, method, **bearer(serving)).status == 501
    assert behind.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/admin/stats", "/v1/admin/requests", "/v1/admin/drain", "/v1/admin", "/v1/admin/", "/stats", "/watch",
        "/v1/admin/watch/", "/v1/admin/watch/../stats", "/v1/admin/../stats", "/v1/admin/%77atch",
        "/v1/admin/blocks/", "/v1/admin/blocks/-1", "/v1/admin/blocks/7/x", "/v1/admin/blocks/٣",
        "/v1/admin/blocks/1e9",
        "/v1/admin/blocks/1234567890123", "http://127.0.0.1/stats", "/v1/admin/watch%20HTTP/1.1", "/V1/ADMIN/watch",
    ],
)  # fmt: skip
def test_of_the_socket_only_what_the_page_reads_is_reached(both: tuple[DashboardServer, StandIn], path: str) -> None:
    serving, behind = both
    behind.asked.clear()
    with socket.create_connection(("127.0.0.1", serving.server_address[1]), timeout=PATIENCE_S) as wire:
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {serving.token}\r\n\r\n"
        wire.sendall(head.encode())
        assert wire.makefile("rb").readline().split()[1] in (b"404", b"400")
    assert behind.asked == []


@given(st.text(max_size=60))
@settings(max_examples=30, deadline=None)
def test_a_model_of_any_name_is_asked_for_in_one_line(model: str) -> None:
    asked: list[str] = []

    class Noted(module._Handler):
        def __init__(self) -> None:
            """No socket."""

        @contextmanager
        def _upstream_response(self, target: str) -> Iterator[Any]:
            asked.append(target)
            yield None

        def _head(self, *_: Any, **__: Any) -> None:
            raise ConfigError("far enough")

    with suppress(ConfigError, AttributeError):
        Noted()._forward("/v1/admin/watch", "model=" + quote(model, safe="", errors="replace"))
    assert len(asked) == 1
    assert asked[0].isascii()
    assert asked[0].isprintable()
    assert " " not in asked[0]


@pytest.mark.parametrize(
    "foreign",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "evil.example:80"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "http://localhost"},
    ],
)
def test_foreign_pages_are_refused_before_the_token_is_looked_at(
    both: tuple[DashboardServer, StandIn], foreign: dict[str, str]
) -> None:
    serving, behind = both
    behind.asked.clear()
    for path in ("/dashboard", "/v1/admin/watch", module.OPENING):
        assert ask(serving, path, **bearer(serving), **foreign).status == 403
    assert behind.asked == []


def test_its_own_page_is_no_foreign_one(both: tuple[DashboardServer, StandIn]) -> None:
    serving = both[0]
    assert ask(serving, "/v1/admin/watch", **bearer(serving), origin=serving.base).status == 200
    assert ask(serving, "/v1/admin/watch", **bearer(serving), host="localhost:8123").status == 200, "through a tunnel"


def test_the_link_on_a_command_line_leads_there_once() -> None:
    with served(WatchSource("http://127.0.0.1:1", Path("/nowhere"))) as serving:
        assert serving.token not in serving.opening_url
        path, url = serving.opening_url.removeprefix(serving.base), serving.url
        assert ask(serving, path + "x").status == 410
        first, second = ask(serving, path), ask(serving, path)
        assert (first.status, first.headers["location"]) == (303, url)
        assert first.headers["cache-control"] == "no-store"
        assert (second.status, "location" in second.headers) == (410, False)
        assert serving.url == f"{serving.base}/dashboard#key={serving.token}"


def test_a_server_that_is_gone_or_refuses_is_told_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    refused = json.dumps({"error": {"message": "too many watch", "code": "server_overloaded"}}).encode()
    with served(WatchSource("http://127.0.0.1:8000", path)) as serving:
        gone = ask(serving, "/v1/admin/watch", **bearer(serving))
        assert (gone.status, gone.code) == (503, "engine_dead")
        assert str(tmp_path) not in gone.data.decode()
        with stand_in(lambda *_: (503, refused), path):
            told = ask(serving, "/v1/admin/watch", **bearer(serving))
            assert (told.status, told.data) == (503, refused)
        path.unlink()
        with stand_in(answer, path):
            assert ask(serving, "/v1/admin/blocks/7", **bearer(serving)).data == BLOCK


def test_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    with served(WatchSource("http://127.0.0.1:1", Path("/nowhere"))) as serving:
        address = ("127.0.0.1", serving.server_address[1])
        idle = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(2)]
        with socket.create_connection(address, timeout=PATIENCE_S) as third:
            assert third.recv(1) == b"", "it is closed without a word"
        for one in idle:
            one.sendall(b"GET /dashboard HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"
            one.close()


def test_a_browser_that_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.05)
    with (
        served(WatchSource("http://127.0.0.1:1", Path("/nowhere"))) as serving,
        socket.create_connection(("127.0.0.1", serving.server_address[1]), timeout=PATIENCE_S) as wire,
    ):
        wire.sendall(b"GET /dash")
        assert wire.recv(1) == b""


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A server of this user, found where quire looks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "quire").mkdir()
    stats = {"url": "http://127.0.0.1:8000", "is_locked": True, "models": [], "num_prompt_tokens": 0}
    whole = json.dumps(stats | {"num_cached_tokens": 0}).encode()
    with stand_in(lambda *_: (200, whole), tmp_path / "quire" / "admin-8000.sock") as here:
        yield here


def test_without_a_browser_the_address_is_printed(own: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: DashboardServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DashboardServer, "serve_forever", interrupted)
    done = CliRunner().invoke(app, ["dashboard", "--no-browser"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("http://127.0.0.1:")
    assert "/dashboard#key=" in done.stdout
    assert done.stderr == ""


def test_a_browser_is_shown_the_way_and_sigterm_ends_it(own: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def terminated(self: DashboardServer) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(DashboardServer, "serve_forever", terminated)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    done = CliRunner().invoke(app, ["dashboard"])
    assert done.exit_code == 128 + signal.SIGTERM
    assert len(opened) == 1
    assert "/open/" in opened[0]
    assert "#key=" not in opened[0]


def test_of_a_server_elsewhere_its_own_page_is_opened(own: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["dashboard", "--server", "https://models.example/v1", "--no-browser"])
    assert (done.exit_code, done.stdout) == (0, "https://models.example/dashboard\n")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    CliRunner().invoke(app, ["dashboard", "--server", "https://models.example"])
    assert opened == ["https://models.example/dashboard"]


def test_a_port_that_is_taken_is_told_with_what_helps(own: StandIn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["dashboard", "--no-browser", "--port", port])
    assert isinstance(done.exception, ConfigError)
    assert "--port" in str(done.exception)


def test_before_a_real_server_with_keys_none_is_needed(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "alice")
    with started(tmp_path) as server, served(WatchSource(f"http://127.0.0.1:{server.port}", server.admin)) as serving:
        assert server.get("/v1/admin/watch") == 401
        block = ask(serving, "/v1/admin/blocks/1", **bearer(serving))
        assert (block.status, block.json["block_id"]) == (200, 1)
        with closing(http.client.HTTPConnection("127.0.0.1", serving.server_address[1], timeout=PATIENCE_S)) as wire:
            wire.request("GET", "/v1/admin/watch?model=oracle", headers=bearer(serving))
            with closing(wire.getresponse()) as response:
                assert response.readline() == b"event: snapshot\n"
                assert json.loads(response.readline().removeprefix(b"data: "))["model"] == "oracle"
