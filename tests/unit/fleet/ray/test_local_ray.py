"""Ray on this machine: started on loopback with its token demanded, remembered, and ended. Here it is a stand-in."""

import json
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.fleet.ray import local_ray
from quire.fleet.ray.local_ray import LocalRay, end_ray, free_address, ray_command, remembered, start_ray, state_folder
from quire.fleet.ray.serve_rest import ServeRest

STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        said = json.dumps({"mode": os.environ.get("RAY_AUTH_MODE"), "token": self.headers["authorization"]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Dashboard).serve_forever()
"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "check_installed", lambda: None)


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    def command(address: str, _gcs: str) -> list[str]:
        return [sys.executable, "-c", program, address.rpartition(":")[2], "ray.scripts.scripts"]

    monkeypatch.setattr(local_ray, "ray_command", command)


def test_it_is_started_with_its_token_remembered_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, STAND_IN)
    environ = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    ray = start_ray(tmp_path / "state", f"http://{free_address()}", environ)
    try:
        token = (tmp_path / "token").read_text()
        told = ServeRest(ray.address, token).details()
        assert told == {"mode": "token", "token": f"Bearer {token}"}
        assert remembered(tmp_path / "state") == ray
        assert ray.gcs.startswith("127.0.0.1:")
    finally:
        end_ray(tmp_path / "state", ray)
    assert not ray.is_alive
    assert remembered(tmp_path / "state") is None


def test_one_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "print('no room')")
    environ = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    with pytest.raises(ConfigError, match="did not start") as error:
        start_ray(tmp_path / "state", f"http://{free_address()}", environ)
    assert str(tmp_path / "state" / "head.log") in str(error.value)
    assert "no room" in (tmp_path / "state" / "head.log").read_text()


def test_it_is_started_nowhere_but_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on this machine alone"):
        start_ray(tmp_path, "http://10.0.0.1:8265", {})


def test_its_command_listens_on_loopback_alone() -> None:
    words = ray_command("http://127.0.0.1:8265", "127.0.0.1:6379")
    assert {"--node-ip-address=127.0.0.1", "--port=6379", "--dashboard-host=127.0.0.1", "--dashboard-port=8265"} <= {
        *words
    }


@pytest.mark.parametrize("written", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "address": "a", "gcs": "b"}'])
def test_what_is_no_ray_of_ours_is_not_remembered(written: str, tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text(written)
    assert remembered(tmp_path) is None


def test_one_that_is_gone_already_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text(json.dumps({"pid": 1, "address": "a", "gcs": "b"}))
    end_ray(tmp_path, LocalRay(1, "a", "b"))
    assert not (tmp_path / "head.json").exists()


def test_its_state_lies_where_state_belongs() -> None:
    assert state_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/quire/ray")
