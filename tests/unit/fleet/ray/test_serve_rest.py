"""Ray's HTTP interface as a fleet asks it: with the token, and with an answer to everything that goes wrong."""

import json
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.fleet.ray.serve_rest import TOKEN, TOKEN_PATH, RayUnreachableError, ServeRest, made_token, read_token

HEARD: list[tuple[str, str, bytes]] = []


class Dashboard(BaseHTTPRequestHandler):
    """Lets in who says the token, and refuses a config that is empty."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        HEARD.append((self.command, self.path, body))
        status = 200 if self.headers.get("authorization") == "Bearer secret" else 401
        if body == b"{}":
            status = 400
        said = b'{"applications": {}}' if self.command == "GET" else b"no such field" if status == 400 else b""
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = _answer  # noqa: N815 - as the library calls them

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    HEARD.clear()
    with HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_call_carries_the_token(address: str) -> None:
    rest = ServeRest(address, "secret")
    assert rest.details() == {"applications": {}}
    rest.deploy({"applications": []})
    assert [(method, path) for method, path, _ in HEARD] == [
        (method, "/api/serve/applications/") for method in ("GET", "PUT")
    ]
    assert json.loads(HEARD[1][2]) == {"applications": []}
    assert "secret" not in repr(rest)


def test_a_token_that_is_wrong_or_missing_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="none given"):
        ServeRest(address).details()
    with pytest.raises(ConfigError, match="another given"):
        ServeRest(address, "guess").details()


def test_what_a_cluster_refuses_is_told_in_its_words(address: str) -> None:
    with pytest.raises(ConfigError, match="400 no such field"):
        ServeRest(address, "secret").deploy({})


def test_a_cluster_that_is_not_there_is_told() -> None:
    with pytest.raises(RayUnreachableError, match="quire fleet ray up"):
        ServeRest("http://127.0.0.1:9", "secret").details()


@pytest.mark.parametrize("address", ["", "127.0.0.1:8265", "ray://127.0.0.1:10001"])
def test_an_address_that_is_no_dashboards_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="that of its dashboard"):
        ServeRest(address).details()


def test_a_token_is_made_once_and_read_as_ray_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "auth" / "token"
    environ = {TOKEN_PATH: str(file)}
    assert read_token(environ) == ""
    token = made_token(environ)
    assert len(token) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made_token(environ) == token == read_token(environ)
    assert read_token({**environ, TOKEN: " given \n"}) == "given"


def test_a_token_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept"):
        made_token({TOKEN_PATH: str(tmp_path / "file" / "token")})
