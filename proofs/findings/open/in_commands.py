"""Reproductions that are commands: `quire` in processes of its own, as a person types them."""

import gzip
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record import ROOT
from quire.api.access.page_sessions import PageSessions
from quire.api.http.errors import ApiError
from tests.support.models.tiny_models import write_gguf
from tests.support.servers.live_server import SIZES, TINY, running

LIMIT_S = 300.0
ADDRESS_SPACE = 3_000_000 << 10
STORE_BYTES = 512 << 10
AGENT = """#!/bin/sh
export XDG_RUNTIME_DIR="$REPRODUCED_RUNTIME"
{python} -m quire top --once > "$REPRODUCED_TOLD" 2>&1
{python} -m quire connect codex >> "$REPRODUCED_TOLD" 2>&1
"""
STALE = {
    "deploy/README.md": "with PyTorch for CPUs",
    "src/quire/client/request/text_model.py": "with a template file",
}
"""What the first hour found wrong in a document, and in a sentence that advises."""


def quire(
    *words: str, more: Mapping[str, str] | None = None, limit_bytes: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """A command, to its end."""

    def limited() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1", **(more or {})},
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=limited,
    )  # fmt: skip


def lacks(text: str, *patterns: str) -> str:
    """The patterns that are not in a text, and its end."""
    missing = [pattern for pattern in patterns if not re.search(pattern, text)]
    return f"expected {missing}, got {text[-300:]!r}" if missing else ""


def bomb(folder: Path) -> str:
    """A7 one line of 2.5 GB in 11 MB of .gz ended `quire sim` with a traceback."""
    path = folder / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(160):
            file.write(b"x" * (16 << 20))
    ran = quire("sim", str(path), limit_bytes=ADDRESS_SPACE)
    if "Traceback" in ran.stderr or ran.returncode != 2:
        return f"code {ran.returncode}: {ran.stderr[-300:]!r}"
    return lacks(ran.stderr, "expected lines of at most")


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def responses_on_a_full_disk(folder: Path) -> str:
    """A8 on a full disk answers said `store: true` and were never found."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    with (
        full_disk(folder / "disk") as disk,
        running(folder, "quire", "serve", str(model), *SIZES, "--store", str(disk / "kept.db")) as server,
    ):
        with suppress_full(), (disk / "rest").open("wb") as rest:
            while True:
                rest.write(b"x" * 4096)
                rest.flush()
        lost = 0
        for at in range(6):
            body = {"model": "tiny", "input": f"{at} " * 100, "max_output_tokens": 2}
            answer = server.post("/v1/responses", body)
            if answer.status != 200:
                return f"answered with {answer.status}: {answer.data[:200]!r}"
            if answer.json["store"] and server.ask("GET", f"/v1/responses/{answer.json['id']}").status != 200:
                lost += 1
        tracebacks = sum("Traceback" in line for line in server.lines)
    return f"{lost} of 6 not found, {tracebacks} tracebacks" if lost or tracebacks else ""


@contextmanager
def suppress_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != 28:
            raise


def one_store_of_two_servers(folder: Path) -> str:
    """B two servers on one store each counted bytes for themselves."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    store = ("--store", str(folder / "kept.db"))
    with running(folder, "quire", "serve", str(model), *SIZES, *store):
        words = (*SIZES, *store, "--port", "0", "--admin-socket", str(folder / "second.sock"))
        ran = quire("serve", str(model), *words)
    return lacks(f"{ran.returncode} {ran.stderr}", "^2 ", "another server keeps its conversations in")


def opening_link(_folder: Path) -> str:
    """B a dashboard link that another user was quicker with left that user the token."""
    sessions = PageSessions()
    token = sessions.make_token(0.0)
    stolen = sessions.begin(token, 1.0)
    try:
        sessions.begin(token, 2.0)
    except ApiError as error:
        return "the first user still has the key" if error.status != 410 or sessions.admits(stolen, 2.0) else ""
    return "the second user got a key as well"


def launched_server(folder: Path) -> str:
    """H4 the server of `quire launch` was not found by top and connect."""
    program, told, runtime = folder / "bin" / "aider", folder / "told", folder / "runtime"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    model = write_gguf(folder / "tiny.gguf", TINY)
    more = {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(runtime),
        "REPRODUCED_RUNTIME": str(runtime),
        "REPRODUCED_TOLD": str(told),
        "QUIRE_MEMORY": "1GiB",
    }
    ran = quire("launch", "aider", "--model", str(model), more=more)
    text = told.read_text() if told.exists() else ran.stderr
    return lacks(text, "tiny") or ("top or connect did not find it" if "no server of yours" in text else "")


def port_in_use(folder: Path) -> str:
    """H12 a worker was spawned and shot before the port was tried."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    with running(folder, "quire", "serve", str(model), *SIZES) as server:
        ran = quire("serve", str(model), "--port", str(server.port), "--admin-socket", str(folder / "second.sock"))
    shown = [line for line in ran.stderr.splitlines() if "worker" in line]
    return shown[0] if shown else lacks(f"{ran.returncode} {ran.stderr}", "^2 ", "choose another --port")


def limits_beyond(folder: Path) -> str:
    """H13 500 GiB of memory and 100,000 tokens were taken without a word."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    flags = ("--memory", "500GiB", "--max-model-len", "100000", "--max-running", "2", "--max-tokens", "2")
    ran = quire("generate", str(model), "one two", *flags)
    return lacks(ran.stderr, r"memory 500.00 GiB exceeds", "max_model_len 100,000 is more than the model supports")


def general_hints(_: Path) -> str:
    """H16 a third of all errors ended with `hint: quire --help`."""
    commands = (
        ["top", "--server", "nonsense://x"],
        ["launch", "nobody"],
        ["explain"],
        ["config", "show", "--nonsense"],
    )
    shown = [" ".join(words) for words in commands if re.search(r"hint: quire --help", quire(*words).stderr)]
    return ", ".join(shown)


def no_network(_: Path) -> str:
    """H23 without a network the error was an errno."""
    ran = quire("pull", "nosuch/model", more={"HF_ENDPOINT": "http://127.0.0.1:1"})
    return lacks(ran.stderr, "the hub is not reachable")


def stale_documents(_: Path) -> str:
    """H wrong or stale documentation."""
    shown = [f"{path}: {words}" for path, words in STALE.items() if words in (ROOT / path).read_text()]
    claude = (ROOT / "docs" / "guides" / "agents" / "claude-code.md").read_text()
    return ", ".join(shown) or lacks(claude, r"(?i)minutes|time limit")


ITEMS = (
    bomb,
    responses_on_a_full_disk,
    one_store_of_two_servers,
    opening_link,
    launched_server,
    port_in_use,
    limits_beyond,
    general_hints,
    no_network,
    stale_documents,
)
