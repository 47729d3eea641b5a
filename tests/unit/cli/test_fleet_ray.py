"""`quire fleet ray config` as an operator types it. Nothing here needs ray."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import cli


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The command as `quire` runs it: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["quire", "fleet", "ray", "config", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_config_for_serve_deploy_is_printed_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--members", "1-4", "--gateways", "2", "--memory", "8GiB", "--threads", "4", "--host", "::1")
    code, out, _ = run(monkeypatch, capsys, "org/model", "--fleet-keys", str(tmp_path / "keys"), *flags)
    config: dict[str, Any] = json.loads(out)
    (application,) = config["applications"]
    assert code == 0
    assert application["args"] == {
        "model": "org/model",
        "name": "model",
        "member_keys": str(tmp_path / "keys" / "member.json"),
        "gateway_keys": str(tmp_path / "keys" / "gateway.json"),
        "settings": {"memory": 2 << 30, "threads": 1, "host": "::1"},
    }
    assert config["http_options"] == {"host": "::1", "port": 8000}
    assert application["deployments"][0]["autoscaling_config"]["max_replicas"] == 4
    assert [*tmp_path.iterdir()] == []


def test_settings_of_a_file_stand_in_the_config_as_replicas_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text("drain_s = 7\n")
    words = ("org/model", "--fleet-keys", "keys", "--config", str(tmp_path / "own.toml"))
    _, out, _ = run(monkeypatch, capsys, *words)
    assert json.loads(out)["applications"][0]["args"]["settings"]["drain_s"] == 7


def test_an_impossible_number_of_members_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "org/model", "--fleet-keys", "keys", "--members", "3-1")
    assert code == 2
    assert "got '3-1'" in err
