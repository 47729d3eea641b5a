"""The whole server as a process: what it says, where it listens, how it ends, and what the operator can do."""

import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.api.access.keys import add_key
from quire.api.listening import listen, listen_unix, listening_unix
from quire.cli import app
from quire.cli.serve.serve import public_names
from quire.config import ServerSettings
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.machine.patience import PATIENCE_S
from tests.support.machine.spawned import LISTENING, Spawned, in_checkout, spawned


@dataclass
class Process(Spawned):
    """A server that runs."""

    folder: Path
    port: int

    @property
    def admin(self) -> Path:
        return self.folder / "run" / "admin.sock"

    def post(self, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps({"model": "oracle", **body}), headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    def get(self, path: str) -> int:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def end(self) -> tuple[int, list[str]]:
        """Its exit code and what it said to the end."""
        return self.process.wait(PATIENCE_S), self.lines


@contextmanager
def started(folder: Path, **flags: object) -> Iterator[Process]:
    given = {"port": 0, "admin_socket": folder / "run" / "admin.sock", "keys_file": folder / "keys.json", **flags}
    said = {name: value for name, value in given.items() if value is not None}
    words = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.support.servers.oracle_server", *words]
    with spawned(command, None, in_checkout(), stops_s=0) as one:
        yield Process(one.process, one.log, folder, int(one.wait_for(rf"{LISTENING}.*\n.")))


def admin(server: Process, method: str, path: str) -> tuple[int, Any]:
    """Ask on the operator's socket."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(PATIENCE_S)
        wire.connect(str(server.admin))
        wire.sendall(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        data = b""
        while part := wire.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_server_says_what_it_has_and_how_to_try_it(tmp_path: Path) -> None:
    with started(tmp_path, log_format="json") as server:
        said = "\n".join(server.lines)
        assert "oracle: an oracle" in said
        assert "no keys: every client that reaches this address has access" in said
        assert f"try: curl http://127.0.0.1:{server.port}/v1/chat/completions" in said
        assert server.post({"prompt": "hello", "max_tokens": 5, "temperature": 0})[0] == 200
        server.process.send_signal(signal.SIGTERM)
        code, lines = server.end()
    assert code == 0
    assert lines[-1] == "ended 0"
    (line,) = [json.loads(line) for line in lines if line.startswith("{") and '"status"' in line]
    told = {name: line[name] for name in ("status", "class", "prompt_tokens", "cached_tokens", "output_tokens")}
    assert told == {"status": 200, "class": "normal", "prompt_tokens": 4, "cached_tokens": 0, "output_tokens": 5}
    assert {"queue_s", "ttft_s", "tokens_per_s", "preemptions", "replays", "tenant", "request_id"} <= set(line)


def test_nothing_listens_but_one_loopback_port_and_the_operators_socket(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        pid = server.process.pid
        own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
        listening = []
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            listening += [row.split()[1] for row in rows
                          if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in own]  # fmt: skip
        assert listening == [f"0100007F:{server.port:04X}"]
        mode = server.admin.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert (stat.S_IMODE(mode), stat.S_IMODE(server.admin.parent.stat().st_mode)) == (0o600, 0o700)


def test_the_operator_sees_who_is_inside_and_can_end_it(tmp_path: Path) -> None:
    with started(tmp_path, step_s=0.02) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = {"model": "oracle", "prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        (told,) = admin(server, "GET", "/requests")[1]["requests"]
        assert (told["state"], told["model"], told["prompt_tokens"]) == ("running", "oracle", 4)
        stats = admin(server, "GET", "/stats")[1]
        assert stats["num_open_requests"] == 1
        assert stats["models"][0]["engine"]["kv_usage"] > 0
        assert admin(server, "DELETE", f"/requests/{told['request_id']}") == (200, {"ended": True})
        assert b"the operator ended this request" in response.read()
        connection.close()
        assert admin(server, "DELETE", "/requests/nobody")[0] == 404
        assert admin(server, "POST", "/cache/clear") == (200, {"cleared": True})
        assert admin(server, "GET", "/nothing")[0] == 404
        assert admin(server, "POST", "/drain")[1]["is_draining"] is True
        assert server.end()[0] == 0
        assert not server.admin.exists()


def test_the_operator_can_end_a_request_whose_body_is_not_there_yet(tmp_path: Path) -> None:
    with started(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        while not (told := admin(server, "GET", "/requests")[1]["requests"]):
            pass
        assert told[0]["state"] == "entering"
        assert admin(server, "DELETE", f"/requests/{told[0]['request_id']}") == (200, {"ended": True})
        data = wire.recv(65536)
        assert data.startswith(b"HTTP/1.1 503 ")
        assert admin(server, "GET", "/requests")[1]["requests"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_those_inside_have_their_end(tmp_path: Path, number: int) -> None:
    with started(tmp_path, step_s=0.02, drain_s=0.2) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        body = {"model": "oracle", "prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        server.process.send_signal(number)
        data = response.read()
        connection.close()
        assert b"server_draining" in data
        assert data.endswith(b"data: [DONE]\n\n")
        code, lines = server.end()
    assert (code, lines[-1]) == (0, "ended 1")


def test_once_there_are_keys_the_server_asks_for_one(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice")
    with started(tmp_path) as server:
        assert "a key is required" in "\n".join(server.lines)
        assert server.post({"prompt": "hello"})[0] == 401
        assert server.post({"prompt": "hello"}, authorization=f"Bearer {secret}")[0] == 200
        assert server.get("/health") == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])  # noqa: S104
def test_no_network_is_let_in_without_keys_unless_on_purpose(host: str) -> None:
    settings = ServerSettings(host=host)
    with raises_code(ConfigError, "invalid_config"):
        settings.check_access_control(has_keys=False, allow_no_keys=False)
    settings.check_access_control(has_keys=True, allow_no_keys=False)
    settings.check_access_control(has_keys=False, allow_no_keys=True)
    for loopback in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        ServerSettings(host=loopback).check_access_control(has_keys=False, allow_no_keys=False)


def test_what_cannot_be_listened_on_is_said_in_a_sentence(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken, raises_code(ConfigError, "invalid_config"):
        listen("127.0.0.1", taken.getsockname()[1])
    tmp_path.chmod(0o755)
    with raises_code(ConfigError, "folder_not_private"):
        listen_unix(tmp_path / "admin.sock")
    with raises_code(ConfigError, "invalid_config"):
        listen_unix(tmp_path / "new" / ("x" * 200))
    listen_unix(tmp_path / "new" / "a.sock").close()
    listen_unix(tmp_path / "new" / "a.sock").close()


def test_an_admin_socket_of_a_server_that_lives_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "own" / "a.sock"
    with listening_unix(path):
        with raises_code(ConfigError, "socket_in_use"):
            listen_unix(path)
        path.unlink()
        listen_unix(path).close()  # somebody else's, made after the first was lost
    assert path.exists()
    with listening_unix(path):
        assert path.is_socket()
    assert not path.exists()


def test_two_servers_on_free_ports_have_an_admin_socket_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with started(tmp_path, admin_socket=None) as first, started(tmp_path, admin_socket=None) as second:
        paths = [tmp_path / "quire" / f"admin-{server.port}.sock" for server in (first, second)]
        assert all(path.is_socket() for path in paths)
        first.process.send_signal(signal.SIGTERM)
        assert first.end()[0] == 0
        assert [path.exists() for path in paths] == [False, True]


def test_a_keys_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    refused = CliRunner().invoke(app, ["serve", "nothing.gguf", "--keys-file", str(path)])
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.settings == ("keys_file",)
    add_key(path, "alice")
    ServerSettings(keys_file=path).check_keys_file()
    ServerSettings().check_keys_file()


def test_models_get_public_names(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2.Q4.gguf").touch()
    (tmp_path / "llama").mkdir()
    paths = [str(tmp_path / "SmolLM2.Q4.gguf"), str(tmp_path / "llama"), "org/name"]
    assert list(public_names(paths, [])) == ["SmolLM2.Q4", "llama", "org/name"]
    assert public_names(paths[:1], ["mine"]) == {"mine": paths[0]}
    with raises_code(ConfigError, "wrong_num_names"):
        public_names(paths, ["mine"])
    with raises_code(ConfigError, "invalid_config"):
        public_names([paths[1], paths[1]], [])


def test_keys_are_made_listed_and_revoked_by_hand(tmp_path: Path) -> None:
    file = ["--keys-file", str(tmp_path / "k.json")]

    def quire(*words: str) -> Any:
        return CliRunner().invoke(app, ["keys", *words, *file])

    assert "there are no keys" in quire("list").stderr
    made = quire("add", "alice", "--max-class", "high", "--tokens-per-minute", "500")
    assert made.exit_code == 0
    assert made.stdout.startswith("quire-")
    listed = quire("list")
    assert "alice" in listed.stdout
    assert made.stdout.strip() not in listed.stdout
    assert json.loads(quire("list", "--json").stdout)[0]["tokens_per_minute"] == 500
    assert quire("revoke", "alice").exit_code == 0
    assert json.loads(quire("list", "--json").stdout) == []


def test_a_person_can_chat_with_a_server(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        done = CliRunner().invoke(app, ["chat", "--url", url, "--max-tokens", "6", "--temperature", "0"],
                                  input="hello\nagain\n/stats\n/exit\n")  # fmt: skip
        assert done.exit_code == 0, done.stderr
        assert f"chatting with oracle at {url}" in done.stderr
        assert done.stderr.count("6 tokens, ") == 2
        assert "2 responses, 12 tokens" in done.stderr
        wrong = CliRunner().invoke(app, ["chat", "nobody", "--url", url])
        assert isinstance(wrong.exception, ConfigError)
    with raises_code(ConfigError, "server_unreachable"):
        CliRunner().invoke(app, ["chat", "--url", url], catch_exceptions=False)
