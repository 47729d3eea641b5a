"""Reproductions that run `quire` commands as separate processes."""

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
{python} -m quire top --once > "$REPRODUCED_OUTPUT" 2>&1
{python} -m quire connect codex >> "$REPRODUCED_OUTPUT" 2>&1
"""
WRONG_WORDS = {
    "deploy/README.md": "with PyTorch for CPUs",
    "src/quire/client/request/text_model.py": "with a template file",
}
"""Files, and wrong words in them that a user found in the first hour."""


def quire(
    *words: str, variables: Mapping[str, str] | None = None, limit_bytes: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a `quire` command to its end, with these environment variables and this limit of its address space."""

    def set_limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENBLAS_NUM_THREADS": "1", **(variables or {})},
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=set_limit,
    )  # fmt: skip


def lacks(text: str, *patterns: str) -> str:
    """A message if the text lacks some of these patterns; else empty."""
    missing = [pattern for pattern in patterns if not re.search(pattern, text)]
    return f"expected {missing}, got {text[-300:]!r}" if missing else ""


def bomb(folder: Path) -> str:
    """A7 one line of 2.5 GB in 11 MB of .gz ended `quire sim` with a traceback."""
    path = folder / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(160):
            file.write(b"x" * (16 << 20))
    process = quire("sim", str(path), limit_bytes=ADDRESS_SPACE)
    if "Traceback" in process.stderr or process.returncode != 2:
        return f"code {process.returncode}: {process.stderr[-300:]!r}"
    return lacks(process.stderr, "expected lines of at most")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 512 KiB on this folder."""
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
        small_disk(folder / "disk") as disk,
        running(folder, "quire", "serve", str(model), *SIZES, "--store", str(disk / "kept.db")) as server,
    ):
        with suppress_disk_full(), (disk / "filler").open("wb") as filler:
            while True:
                filler.write(b"x" * 4096)
                filler.flush()
        num_lost = 0
        for number in range(6):
            body = {"model": "tiny", "input": f"{number} " * 100, "max_output_tokens": 2}
            answer = server.post("/v1/responses", body)
            if answer.status != 200:
                return f"expected status 200, got {answer.status}: {answer.data[:200]!r}"
            if answer.json["store"] and server.ask("GET", f"/v1/responses/{answer.json['id']}").status != 200:
                num_lost += 1
        num_tracebacks = sum("Traceback" in line for line in server.lines)
    return f"{num_lost} of 6 not found, {num_tracebacks} tracebacks" if num_lost or num_tracebacks else ""


@contextmanager
def suppress_disk_full() -> Iterator[None]:
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
        process = quire("serve", str(model), *words)
    return lacks(f"{process.returncode} {process.stderr}", "^2 ", "another server keeps its conversations in")


def opening_link(_folder: Path) -> str:
    """B another user who opened a dashboard link first kept the session of its token."""
    sessions = PageSessions()
    token = sessions.make_token(0.0)
    first_session = sessions.begin(token, 1.0)
    try:
        sessions.begin(token, 2.0)
    except ApiError as error:
        return "the first session still works" if error.status != 410 or sessions.admits(first_session, 2.0) else ""
    return "the token began a second session"


def launched_server(folder: Path) -> str:
    """H4 the server of `quire launch` was not found by top and connect."""
    program, output, runtime = folder / "bin" / "aider", folder / "output", folder / "runtime"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    model = write_gguf(folder / "tiny.gguf", TINY)
    variables = {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(runtime),
        "REPRODUCED_RUNTIME": str(runtime),
        "REPRODUCED_OUTPUT": str(output),
        "QUIRE_MEMORY": "1GiB",
    }
    process = quire("launch", "aider", "--model", str(model), variables=variables)
    text = output.read_text() if output.exists() else process.stderr
    return lacks(text, "tiny") or ("top or connect did not find the server" if "no server of yours" in text else "")


def port_in_use(folder: Path) -> str:
    """H12 a worker was started and killed before the port was tried."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    with running(folder, "quire", "serve", str(model), *SIZES) as server:
        process = quire("serve", str(model), "--port", str(server.port), "--admin-socket", f"{folder}/second.sock")
    lines = [line for line in process.stderr.splitlines() if "worker" in line]
    return lines[0] if lines else lacks(f"{process.returncode} {process.stderr}", "^2 ", "choose another --port")


def limits_beyond(folder: Path) -> str:
    """H13 `generate` accepted 500 GiB of memory and 100,000 tokens without a warning."""
    model = write_gguf(folder / "tiny.gguf", TINY)
    flags = ("--memory", "500GiB", "--max-model-len", "100000", "--max-running", "2", "--max-tokens", "2")
    process = quire("generate", str(model), "one two", *flags)
    return lacks(process.stderr, r"memory 500.00 GiB exceeds", "max_model_len 100,000 is more than the model supports")


def general_hints(_: Path) -> str:
    """H16 a third of all errors ended with `hint: quire --help`."""
    commands = (
        ["top", "--server", "nonsense://x"],
        ["launch", "nobody"],
        ["explain"],
        ["config", "show", "--nonsense"],
    )
    lines = [" ".join(words) for words in commands if re.search(r"hint: quire --help", quire(*words).stderr)]
    return ", ".join(lines)


def no_network(_: Path) -> str:
    """H23 without a network the error was an errno."""
    process = quire("pull", "nosuch/model", variables={"HF_ENDPOINT": "http://127.0.0.1:1"})
    return lacks(process.stderr, "the hub is not reachable")


def stale_documents(_: Path) -> str:
    """H wrong or stale documentation."""
    places = [f"{path}: {words}" for path, words in WRONG_WORDS.items() if words in (ROOT / path).read_text()]
    claude = (ROOT / "docs" / "guides" / "agents" / "claude-code.md").read_text()
    return ", ".join(places) or lacks(claude, r"(?i)minutes|time limit")


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
