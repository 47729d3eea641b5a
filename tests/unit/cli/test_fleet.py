"""`quire fleet` and `quire serve --replicas` as a person types them: what is said and refused, and that it serves."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import cli
from tests.support.fleet.oracle_member import member_process
from tests.support.machine.patience import PATIENCE_S
from tests.support.machine.spawned import LISTENING, spawned

ROOT = Path(__file__).parents[3]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The command as `quire` runs it: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["quire", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_keys_are_made_once_and_can_be_read_by_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "fleet", "keys", str(tmp_path / "keys"))
    files = [Path(line) for line in out.splitlines()]
    assert (code, [file.name for file in files]) == (0, ["member.json", "gateway.json"])
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert "keep both secret" in err
    assert not any(json.loads(file.read_text())["secret"] in out + err for file in files)
    code, _, err = run(monkeypatch, capsys, "fleet", "keys", str(tmp_path / "keys"))
    assert code == 2
    assert "never overwritten" in err


def members_file(folder: Path, *addresses: str) -> str:
    file = folder / "members.txt"
    file.write_text("".join(f"{address}  # one of them\n" for address in addresses))
    return str(file)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["http://10.0.0.1:7000"], "expected addresses with tcp:// or ipc://"),
        ([], "at least one address"),
        (["tcp://10.0.0.1:7000"], "expected fleet keys"),
        (["openai:http://10.0.0.1:8000"], "--allow-clear-member"),
        (["openai:http://127.0.0.1:8000"], "--tokenizer MODEL"),
        (["openai:http://127.0.0.1:8000 colour=red"], "key-file="),
    ],
)
def test_a_list_of_members_that_cannot_be_is_an_error(
    lines: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = ("--port", "0", "--admin-socket", str(tmp_path / "admin.sock"))
    code, _, err = run(monkeypatch, capsys, "fleet", "gateway", "--members", members_file(tmp_path, *lines), *own)
    assert code == 2
    assert err.splitlines()[0].startswith("error: ")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("given", ["nothing.txt", "dns:", "dns:name:port", "dns:name:99999"])
def test_a_source_of_members_that_is_none_is_an_error(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "fleet", "gateway", "--members", given)
    assert code == 2
    assert given.partition(":")[0] in err.splitlines()[0]


def test_keys_that_are_none_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.json").write_text('{"public": "short"}')
    words = ("--members", members_file(tmp_path, "tcp://10.0.0.1:1"), "--fleet-keys", str(tmp_path / "keys.json"))
    code, _, err = run(monkeypatch, capsys, "fleet", "gateway", *words)
    assert code == 2
    assert "quire fleet keys" in err


def test_a_member_without_a_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "fleet", "member", str(tmp_path / "nothing.gguf"))
    assert code == 2
    assert "nothing.gguf" in err
    assert "Traceback" not in err


def test_replicas_are_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "serve", "one.gguf", "two.gguf", "--replicas", "2")
    assert code == 2
    assert "expected one model with --replicas, got 2" in err


def test_help_says_that_one_machine_needs_none_of_it() -> None:
    result = CliRunner().invoke(cli.app, ["fleet", "--help"])
    assert result.exit_code == 0
    assert "One machine needs only `quire serve`" in " ".join(result.output.split())
    for name in ("keys", "member", "gateway"):
        assert name in result.output


@contextmanager
def gateway_process(folder: Path, members: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """One that listens, and its port."""
    words = ("--port", "0", "--admin-socket", str(folder / "admin.sock"))
    command = [sys.executable, "-m", "quire", "fleet", "gateway", "--members", members, "--name", "oracle", *words]
    with spawned(command, None, {**os.environ, "HOME": str(folder)}, stops_s=0) as gateway:
        yield gateway.process, int(gateway.wait_for(LISTENING))


def ask(port: int, prompt: str, **more: object) -> tuple[int, dict[str, object]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    body = {"model": "oracle", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    return response.status, told


def test_a_gateway_answers_with_the_members_of_its_list_as_the_list_changes_and_ends_when_told(tmp_path: Path) -> None:
    with member_process() as first, gateway_process(tmp_path, members_file(tmp_path, first.address)) as (process, port):
        status, told = ask(port, "once")
        assert status == 200, told
        expected = told["choices"]
        with member_process() as second:
            members_file(tmp_path, second.address)
            first.send_signal(signal.SIGTERM)
            assert first.process.wait(PATIENCE_S) == 0
            status, told = ask(port, "once")
            assert (status, told.get("choices")) == (200, expected)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
