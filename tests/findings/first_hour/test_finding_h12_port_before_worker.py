"""An address that cannot be had is found before a worker is spawned, and what runs already is named."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from quire.worker.parent import spawned_worker
from tests.api.serving.test_process import started
from tests.support.models.tiny_models import Tiny, write_gguf


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawned(*_given: object) -> None:
        pytest.fail("a worker was spawned")

    monkeypatch.setattr(spawned_worker, "SpawnedWorker", spawned)


@pytest.mark.usefixtures("_no_worker")
@pytest.mark.parametrize("command", ["serve", "run"])
def test_a_port_that_is_taken_costs_no_worker(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = write_gguf(tmp_path / "tiny.gguf", Tiny())
    with taken_port() as port, pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, [command, str(file), "--port", str(port)], catch_exceptions=False)
    assert refused.value.settings == ("port",)


@pytest.mark.usefixtures("_no_worker")
def test_a_network_without_keys_costs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = ["serve", str(write_gguf(tmp_path / "tiny.gguf", Tiny())), "--host", "192.0.2.1", "--port", "0"]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert refused.value.settings == ("host",)


@pytest.mark.usefixtures("_no_worker")
def test_a_model_that_runs_on_that_port_already_is_named_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    file = write_gguf(tmp_path / "tiny.gguf", Tiny())
    with started(tmp_path) as server:
        (tmp_path / "runtime" / "quire").mkdir(parents=True, mode=0o700)
        (tmp_path / "runtime" / "quire" / f"admin-{server.port}.sock").symlink_to(server.admin)
        words = ["run", str(file), "--port", str(server.port), "--no-browser"]
        with pytest.raises(ConfigError) as refused:  # another model runs there
            CliRunner().invoke(app, words, catch_exceptions=False)
        assert refused.value.settings == ("port",)
        monkeypatch.setattr(sys.modules["quire.cli.models.pull"], "fetch_model", lambda *_given, **_more: "oracle")
        ran = CliRunner().invoke(app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert f"is already served at http://127.0.0.1:{server.port}" in ran.output
