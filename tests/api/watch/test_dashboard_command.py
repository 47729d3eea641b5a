"""`quire dashboard`: what its token lets a page do, and what it prints and opens."""

import json
import webbrowser
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.api.access.keys import add_key
from quire.cli import app
from quire.cli.serve.run import browser_url
from quire.cli.shared.found_servers import admin_request
from quire.errors import ConfigError
from tests.api.serving.test_process import started
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.watch_stand_in import Answer, StandIn, stand_in

SESSION = "/v1/admin/session"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LiveServer]:
    """A server with keys, none of which a test knows."""
    add_key(tmp_path / "keys.json", "alice")
    with house(keys_file=tmp_path / "keys.json") as here:
        yield here


def key_of(here: LiveServer) -> str:
    token = token_of(here)
    return str(here.post(SESSION, None, authorization=f"Bearer {token}").json["key"])


def token_of(here: LiveServer) -> str:
    async def make() -> str:
        return here.admission.page_sessions.make_token(here.loop.time())

    return here.run(make)


def test_a_page_with_the_token_reads_the_stream_and_blocks_and_nothing_else(locked: LiveServer) -> None:
    own = f"Bearer {key_of(locked)}"
    assert locked.get("/v1/admin/blocks/1", authorization=own).status == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", SESSION)):
        assert locked.request(method, path, None, authorization=own).status == 401
    assert locked.get("/v1/admin/blocks/1", x_api_key=own.removeprefix("Bearer ")).status == 401
    with closing(locked.connection()) as wire:
        wire.request("GET", "/v1/admin/watch", headers={"authorization": own})
        response = wire.getresponse()
        assert response.readline() == b"event: snapshot\n"
        response.close()
    locked.wait_until(lambda: not locked.admission.watchers.num_subscribers)


@pytest.mark.parametrize("presented", ["", "Bearer", "Bearer ", "Bearer x", "Basic {}", "Bearer {}x", "{}"])
def test_without_the_token_there_is_no_session(locked: LiveServer, presented: str) -> None:
    token = token_of(locked)
    headers = {"authorization": presented.format(token)} if presented else {}
    refused = locked.request("POST", f"{SESSION}?token={token}", {"token": token}, x_api_key=token, **headers)
    assert (refused.status, refused.code) == (401, "invalid_api_key")
    assert token not in refused.data.decode()
    assert locked.request("POST", SESSION, None, authorization=f"Bearer {token}").status == 200, "it is still good"


def test_a_token_that_is_used_twice_ends_the_page_that_it_opened(locked: LiveServer) -> None:
    token = token_of(locked)
    own = f"Bearer {locked.request('POST', SESSION, None, authorization=f'Bearer {token}').json['key']}"
    with closing(locked.connection()) as wire:
        wire.request("GET", "/v1/admin/watch", headers={"authorization": own})
        response = wire.getresponse()
        assert response.readline() == b"event: snapshot\n"
        second = locked.request("POST", SESSION, None, authorization=f"Bearer {token}")
        assert second.status == 410
        assert b"another user" in second.data
        response.read()  # it ends
    assert locked.get("/v1/admin/blocks/1", authorization=own).status == 401


@pytest.mark.parametrize("foreign", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}])
def test_without_keys_foreign_pages_are_refused_before_the_token_is_looked_at(foreign: dict[str, str]) -> None:
    with house() as here:
        token = token_of(here)
        assert here.request("POST", SESSION, None, authorization=f"Bearer {token}", **foreign).status == 403
        assert here.request("POST", SESSION, None, authorization=f"Bearer {token}").status == 200


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A server of this user, found where quire looks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "quire").mkdir()
    stats = {"url": "http://0.0.0.0:8000", "is_locked": True, "models": [], "num_prompt_tokens": 0}
    whole = json.dumps(stats | {"num_cached_tokens": 0}).encode()

    def answer(path: str, headers: dict[str, str]) -> Answer:
        return (200, b'{"token": "t-1"}') if path == "/dashboard" else (200, whole)

    with stand_in(answer, tmp_path / "quire" / "admin-8000.sock") as here:
        yield here


def test_without_a_browser_the_address_is_printed(own: StandIn) -> None:
    done = CliRunner().invoke(app, ["dashboard", "--no-browser"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "http://127.0.0.1:8000/dashboard#token=t-1\n"
    assert [(method, path) for method, path, _ in own.asked] == [("GET", "/stats"), ("POST", "/dashboard")]


def test_a_tunnel_has_a_port_of_its_own(own: StandIn) -> None:
    done = CliRunner().invoke(app, ["dashboard", "--no-browser", "--port", "8123"])
    assert done.stdout == "http://127.0.0.1:8123/dashboard#token=t-1\n"


def test_a_browser_is_opened_there(own: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert CliRunner().invoke(app, ["dashboard"]).exit_code == 0
    assert opened == ["http://127.0.0.1:8000/dashboard#token=t-1"]


def test_of_a_server_elsewhere_its_own_page_is_opened(own: StandIn) -> None:
    done = CliRunner().invoke(app, ["dashboard", "--server", "https://models.example/v1", "--no-browser"])
    assert (done.exit_code, done.stdout) == (0, "https://models.example/dashboard\n")


def test_a_server_without_a_page_is_told_with_what_helps(own: StandIn) -> None:
    refusal = json.dumps({"error": {"message": "this server has no pages; start it without --no-page"}}).encode()
    answer = own.answer
    own.answer = lambda path, headers: (400, refusal) if path == "/dashboard" else answer(path, headers)
    with raises_code(ConfigError, "no_dashboard") as refused:
        CliRunner().invoke(app, ["dashboard", "--no-browser"], catch_exceptions=False)
    assert "--no-page" in str(refused.value)


def test_where_a_server_listens_on_all_addresses_it_is_reached_on_loopback() -> None:
    assert browser_url("http://[::]:8000", 0) == "http://[::1]:8000"
    assert browser_url("http://192.0.2.1:8000", 0) == "http://192.0.2.1:8000"


def test_a_real_server_with_keys_opens_to_the_token_of_its_socket(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "alice")
    with started(tmp_path) as server:
        assert server.get("/v1/admin/watch") == 401
        assert admin_request(server.admin, "POST", "/dashboard")["token"]
