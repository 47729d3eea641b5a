"""`quire launch` with a real server process and an agent that is a script: what it is told, and what is left behind."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.api.listening import listening_unix
from quire.cli import app
from quire.cli.agents.agent_clients import AGENTS, Server
from quire.cli.agents.launched_server import child_process, final_lines
from quire.cli.shared.ending import exit_on_signals
from quire.cli.shared.found_servers import FoundServer, linked_socket, running_servers, server_on_socket
from quire.errors import ConfigError
from tests.api.serving.test_process import started
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S

AGENT = """#!{python}
import json, os, sys, tempfile, urllib.request
tempfile.mkdtemp()
told = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
told["files"] = {{}}
for name in ("CODEX_HOME", "QWEN_HOME"):
    if name in os.environ:
        folder = os.environ[name]
        told["files"] = {{one: open(os.path.join(folder, one)).read() for one in os.listdir(folder)}}
if "OPENCODE_CONFIG" in os.environ:
    told["files"] = {{"opencode.json": open(os.environ["OPENCODE_CONFIG"]).read()}}
body = json.dumps({{"model": "oracle", "prompt": "one two three four five six", "max_tokens": 1}}).encode()
for _ in range(2):
    kind = {{"content-type": "application/json"}}
    asked = urllib.request.Request(os.environ["TEST_URL"] + "/v1/completions", body, kind)
    urllib.request.urlopen(asked).read()
open(os.environ["TEST_TOLD"], "w").write(json.dumps(told))
sys.exit(7)
"""


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_is_told_of_the_server_and_nothing_is_left(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, told_path, temporary = tmp_path / "bin", tmp_path / "told.json", tmp_path / "temporary"
    for folder in (programs, temporary):
        folder.mkdir()
    program = programs / AGENTS[agent].program
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    with started(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        found = server_on_socket(server.admin)
        assert found is not None
        assert (found.url, found.is_locked, found.models[0].name) == (url, False, "oracle")
        runtime = tmp_path / "runtime" / "quire"
        runtime.mkdir(parents=True, mode=0o700)
        (runtime / "admin-1.sock").symlink_to(server.admin)
        (runtime / "admin-2.sock").symlink_to(tmp_path / "gone")
        folders = {
            "XDG_RUNTIME_DIR": tmp_path / "runtime",
            "XDG_STATE_HOME": tmp_path / "state",
            "TMPDIR": temporary,
            "TEST_TOLD": told_path,
        }
        for name, value in (*folders.items(), ("TEST_URL", url)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        monkeypatch.setattr("tempfile.tempdir", None)
        assert [one.url for one in running_servers()] == [url]
        ran = CliRunner().invoke(app, ["launch", agent, "--", "do", "it"])
        assert ran.exit_code == 7, ran.output
        assert "prompt tokens were cached" in ran.output
        shown = CliRunner().invoke(app, ["connect", agent])
        assert shown.exit_code == 0
        assert url in shown.output
    told = json.loads(told_path.read_text())
    assert told["arguments"][-2:] == ["do", "it"]
    assert any(url in text for text in (*told["environment"].values(), *told["files"].values()))
    assert not list(temporary.iterdir())


def test_an_agent_whose_terminal_is_closed_ends_and_leaves_nothing(tmp_path: Path) -> None:
    programs, temporary, pid_file = tmp_path / "bin", tmp_path / "temporary", tmp_path / "pid"
    for folder in (programs, temporary, tmp_path / "runtime" / "quire"):
        folder.mkdir(parents=True, mode=0o700)
    os.mkfifo(pid_file)
    program = programs / "aider"
    program.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nexec cat\n")
    program.chmod(stat.S_IRWXU)
    with started(tmp_path) as server:
        (tmp_path / "runtime" / "quire" / "admin-1.sock").symlink_to(server.admin)
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "TMPDIR": str(temporary),
        }
        words = [sys.executable, "-m", "quire", "launch", "aider"]
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as launched:
            agent_pid = int(pid_file.read_text())
            assert list(temporary.iterdir())
            launched.send_signal(signal.SIGHUP)
            assert launched.wait(PATIENCE_S) == 128 + signal.SIGHUP
        assert not Path(f"/proc/{agent_pid}").exists()
    assert not list(temporary.iterdir())


def test_a_child_that_is_just_being_spawned_ends_with_us_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    really = subprocess.Popen

    def told_meanwhile(*words: Any, **how: Any) -> "subprocess.Popen[bytes]":
        spawned.append(really(*words, **how))
        os.kill(os.getpid(), signal.SIGHUP)
        return spawned[0]

    monkeypatch.setattr(subprocess, "Popen", told_meanwhile)
    with pytest.raises(SystemExit) as ended, exit_on_signals(), child_process(["sleep", "600"]):
        pytest.fail("somebody was told to end, and went on")
    assert ended.value.code == 128 + signal.SIGHUP
    assert spawned[0].returncode == -signal.SIGTERM


def test_without_a_server_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "aider"
    program.write_text("#!/bin/sh\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for words in (["launch", "aider"], ["connect", "aider"]):
        with raises_code(ConfigError, "no_server_running"):
            CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(("words", "code"), [(["nobody"], "unknown_agent"), (["qwen"], "invalid_config")])
def test_an_agent_that_cannot_be_launched_is_refused(
    words: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_code(ConfigError, code):
        CliRunner().invoke(app, ["launch", *words], catch_exceptions=False)


def test_what_changes_with_the_folder_does_not_stand_before_the_tools_of_claude_code(tmp_path: Path) -> None:
    setup = AGENTS["claude"].setup(Server("http://127.0.0.1:1", "m", "none"), tmp_path)
    assert "--exclude-dynamic-system-prompt-sections" in setup.arguments


def test_aider_has_a_home_of_its_own_in_which_git_knows_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, folder = tmp_path / "own home", tmp_path / "aider"
    for one in (own, folder):
        one.mkdir()
    (own / ".gitconfig").write_text("[user]\n\tname = somebody\n")
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    setup = AGENTS["aider"].setup(Server("http://127.0.0.1:1", "m", "none"), folder)
    for path, text in setup.files.items():
        (folder / path).write_text(text)
    assert setup.variables["HOME"] == str(folder)
    words, around = ["git", "config", "user.name"], {**os.environ, **setup.variables}
    assert subprocess.check_output(words, cwd=tmp_path, env=around, text=True) == "somebody\n"


def test_a_locked_server_wants_a_key_and_a_key_is_shown_to_nobody(tmp_path: Path) -> None:
    server = Server("http://127.0.0.1:1", "m", "secret", 4096)
    for agent in AGENTS.values():
        setup: Any = agent.setup(server, tmp_path)
        assert "secret" in setup.variables.values()
        assert "secret" not in "".join([*setup.arguments, *setup.files.values()])


def test_a_link_that_a_killed_launch_left_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "quire"
    folder.mkdir(mode=0o700)
    link, own = folder / "admin-4711.sock", tmp_path / "own.sock"
    link.symlink_to(tmp_path / "gone")
    with linked_socket(own, FoundServer(own, "http://127.0.0.1:4711", False, (), 0, 0)):
        assert link.readlink() == own
    assert not link.is_symlink()
    link.symlink_to(tmp_path / "gone")
    with listening_unix(link):
        assert link.is_socket()


def test_a_start_that_fails_shows_its_error_and_not_what_came_before() -> None:
    log = "\n".join([*["loading weights: 1 of 9 MB"] * 99, "error: port 1 is taken;", "choose another", "", ""])
    assert final_lines(log) == ["error: port 1 is taken;", "choose another"]
    assert final_lines("\n".join(map(str, range(99))))[0] == "79"
