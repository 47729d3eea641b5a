"""`quire fleet ray` as a person types it, before a cluster that only pretends. Nothing here needs ray."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from quire.fleet.ray import local_ray
from quire.fleet.ray.config import MemberCount, RayFleetArgs, serve_config


class Cluster(BaseHTTPRequestHandler):
    """Runs at once whatever it is told."""

    deployed: dict[str, Any] | None = None

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.command == "PUT":
            Cluster.deployed = json.loads(body)
        known = (Cluster.deployed or {}).get("applications", [])
        state = {"status": "RUNNING", "message": ""}
        found = {one["name"]: {**state, "deployed_app_config": one} for one in known}
        said = json.dumps({"applications": found, "http_options": {"host": "127.0.0.1", "port": 8000}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = _answer  # noqa: N815 - as the library calls them

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Cluster.deployed = None
    with HTTPServer(("127.0.0.1", 0), Cluster) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _has_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "check_installed", lambda: None)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The command as `quire` runs it: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["quire", "fleet", "ray", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize("words", [("up", "model.gguf"), ("status",)])
def test_without_ray_it_is_said_what_to_install(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_ray, "find_spec", lambda _name: None)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert "install the extra quire[ray]" in err
    assert "Traceback" not in err


def test_a_config_is_shown_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("up", "org/model", "--members", "1-4", "--memory", "8GiB", "--threads", "4", "--show", "--gateways", "2")
    code, out, _ = run(monkeypatch, capsys, *words)
    (application,) = json.loads(out)["applications"]
    assert code == 0
    assert application["args"]["settings"] == {"memory": 2 << 30, "threads": 1}
    assert application["args"]["name"] == "model"
    assert application["deployments"][0]["autoscaling_config"]["max_replicas"] == 4
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("_has_ray")
def test_a_fleet_is_deployed_scaled_and_ended(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "up", "org/model", "--memory", "8GiB", "--address", address)
    assert (code, out) == (0, "http://127.0.0.1:8000\n")
    assert "RUNNING" in err
    assert Cluster.deployed is not None
    args = Cluster.deployed["applications"][0]["args"]
    keys = [Path(args[name]) for name in ("member_keys", "gateway_keys")]
    assert all(file.is_relative_to(tmp_path) and file.exists() for file in keys)
    assert not any(json.loads(file.read_text())["secret"] in json.dumps(Cluster.deployed) for file in keys)
    code, _, _ = run(monkeypatch, capsys, "scale", "3", "--address", address)
    assert code == 0
    (application,) = Cluster.deployed["applications"]
    assert application["deployments"][0] == MemberCount(3, 3).deployment
    assert application["args"] == args
    assert run(monkeypatch, capsys, "down", "--address", address)[0] == 0
    assert Cluster.deployed["applications"] == []


@pytest.mark.usefixtures("_has_ray")
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_file_is_deployed_as_it_is(
    suffix: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = serve_config(RayFleetArgs("org/model"), MemberCount(2, 2))
    file = tmp_path / f"fleet{suffix}"
    file.write_text(json.dumps(config))  # which is YAML as well
    assert run(monkeypatch, capsys, "up", str(file), "--address", address)[0] == 0
    assert Cluster.deployed == config


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("fleet.json", "{", "expected JSON"),
        ("fleet.yaml", "a: [", "expected YAML"),
        ("fleet.yaml", "a: 1", "list of applications"),
        ("fleet.yaml", None, "cannot read"),
    ],
)
def test_a_file_that_is_no_config_is_told(
    name: str,
    text: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = run(monkeypatch, capsys, "up", str(tmp_path / name))
    assert code == 2
    assert words in err


def test_an_application_that_is_not_there_is_told(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "scale", "3", "--address", address)
    assert code == 2
    assert "(none), got quire" in err


def test_a_cluster_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "down", "--address", "http://127.0.0.1:9")
    assert code == 2
    assert "nobody answers" in err
