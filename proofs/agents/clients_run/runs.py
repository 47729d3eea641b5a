"""Runs a client program as a user would: in its own folder, with its own home, and no network but loopback.

A client is judged by its output and by the files in its folder, not by the requests that the server got.
"""

import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")
NOWHERE = "http://127.0.0.1:9"
"""The proxy and the server address that clients must not use: nothing listens there."""
QUIET_VARIABLES = {
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
    "NO_COLOR": "1",
    "CI": "1",
}
RUN_S = 600.0
SHOWN_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one client run, and the server that the client uses."""

    folder: Path
    url: str
    model: str
    key: str = "none"

    @property
    def home(self) -> Path:
        """The user's home."""
        return self.folder / "home"

    @property
    def work(self) -> Path:
        """The folder that the client works in."""
        return self.folder / "work"

    @classmethod
    def create(cls, folder: Path, url: str, model: str, key: str = "none") -> "Workspace":
        """Make the empty folders."""
        workspace = cls(folder, url, model, key)
        for subfolder in (workspace.home, workspace.work, workspace.folder / "tmp"):
            subfolder.mkdir(parents=True)
        return workspace

    def make_repository(self) -> None:
        """Make the work folder a git repository, as most are: its status changes with every file."""
        (self.work / "readme.md").write_text("A project.\n")
        author = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
        for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message", "begin"]):
            subprocess.run(["git", *words], cwd=self.work, env=self.environment(Path("/usr/bin"), {}), check=True)

    def environment(self, programs: Path, variables: Mapping[str, str]) -> dict[str, str]:
        """All environment variables of a client."""
        base = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        proxies = {f"{kind}_PROXY": NOWHERE for kind in ("HTTP", "HTTPS", "ALL")}
        no_proxies = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        lower_proxies = {name.lower(): value for name, value in proxies.items()}
        folders = {"HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), "PATH": f"{programs}:{base['PATH']}"}
        return {**base, **proxies, **lower_proxies, **no_proxies, **QUIET_VARIABLES, **folders, **variables}


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What a client printed, and how it ended."""

    code: int
    output: str
    errors: str
    took_s: float

    @property
    def output_end(self) -> str:
        """The end of its output."""
        return (self.output + self.errors)[-SHOWN_CHARS:]


@dataclass(frozen=True, slots=True)
class Invocation:
    """A client's command line, its environment variables, and the folder of its programs."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    programs: Path = Path("/usr/bin")


def run_client(workspace: Workspace, invocation: Invocation, timeout_s: float = RUN_S) -> ClientRun:
    """Run a client until it ends; after `timeout_s`, kill it. Its children are killed in any case."""
    start_s = perf_counter()
    process = subprocess.Popen(
        invocation.words,
        cwd=workspace.work,
        env=workspace.environment(invocation.programs, invocation.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_all(process.pid)
        output, errors = process.communicate()
        errors += f"\n(killed after {timeout_s:.0f} s)"
    finally:
        _kill_all(process.pid)
    return ClientRun(process.returncode, output, errors, perf_counter() - start_s)


def _kill_all(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def nonce() -> str:
    """A random word that cannot be guessed."""
    return f"quire-{secrets.token_hex(4)}"
