"""Whoever is told to end while a model downloads ends, however silent the hub is."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WITHIN_S = 25
"""It takes a second or two; Docker gives ten before it kills, and a test some more on a busy machine."""
REVISION = "0" * 40
FILES = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]


class Hub(ThreadingHTTPServer):
    """Tells what a model consists of, or not even that, and never sends a file."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *, tells: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.tells = tells
        self.is_asked = threading.Event()
        self.is_over = threading.Event()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if not self.server.tells or not self.path.startswith("/api/models/"):
            self.server.is_asked.set()
            self.server.is_over.wait()
            return
        told = {"id": "org/name", "modelId": "org/name", "sha": REVISION}
        body = json.dumps({**told, "siblings": [{"rfilename": name} for name in FILES]}).encode()
        if "/tree/" in self.path:
            files = [{"type": "file", "path": name, "size": 1000, "oid": REVISION} for name in FILES]
            body = json.dumps(files).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - so the library calls it

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def hub(*, tells: bool) -> Iterator[Hub]:
    with Hub(tells=tells) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()


@contextmanager
def started(server: Hub, folder: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A command at the moment it hangs in a download."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}",
        "HOME": str(folder),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(folder / "hub"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "quire", *words]
    # What a shell runs in the background ignores Ctrl-C, and so would all that it starts, this test's command too.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, ours)
    try:
        assert server.is_asked.wait(60), process.communicate(timeout=60)
        yield process
    finally:
        process.kill()
        process.communicate()


def is_gone(process: "subprocess.Popen[str]") -> bool:
    try:
        process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("tells", [False, True])
def test_a_server_ends_at_the_first_sigterm(tmp_path: Path, tells: bool) -> None:
    words = ("serve", "org/name", "--port", "0", "--admin-socket", str(tmp_path / "run" / "admin.sock"))
    with hub(tells=tells) as server, started(server, tmp_path, *words) as process:
        process.send_signal(signal.SIGTERM)
        assert is_gone(process), "it waits for the hub"
        assert process.returncode == 0
    whole = [path for path in tmp_path.rglob("*.safetensors") if path.is_file()]
    assert whole == [], "nothing half-written is taken for whole"


@pytest.mark.parametrize("words", [("generate", "org/name", "Hello"), ("chat", "org/name"), ("info", "org/name")])
def test_a_command_ends_at_the_first_ctrl_c(tmp_path: Path, words: tuple[str, ...]) -> None:
    with hub(tells=True) as server, started(server, tmp_path, *words) as process:
        process.send_signal(signal.SIGINT)
        assert is_gone(process), "it waits for the hub"
        assert process.returncode not in (0, None)
