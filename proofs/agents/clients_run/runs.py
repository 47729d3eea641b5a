"""Runs a client as a person would: in a folder of its own, with a home of its own, and no way out but loopback.

What a client did is read from the folder it worked in and from what it printed; what the server saw counts for nothing.
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

KEPT = ("PATH", "LANG", "LC_ALL", "TZ")
NOWHERE = "http://127.0.0.1:9"
"""What clients are told is the way to the network: nobody listens there."""
OFF = {
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
class Ground:
    """Where clients work and whom they ask."""

    folder: Path
    url: str
    model: str
    key: str = "none"

    @property
    def home(self) -> Path:
        """The user's."""
        return self.folder / "home"

    @property
    def work(self) -> Path:
        """What they work on."""
        return self.folder / "work"

    @classmethod
    def made(cls, folder: Path, url: str, model: str, key: str = "none") -> "Ground":
        """With empty folders."""
        ground = cls(folder, url, model, key)
        for one in (ground.home, ground.work, ground.folder / "tmp"):
            one.mkdir(parents=True)
        return ground

    def make_repository(self) -> None:
        """As most work is in one: what git says of it changes with every file."""
        (self.work / "readme.md").write_text("A project.\n")
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.invalid")
        for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "begin"]):
            subprocess.run(["git", *words], cwd=self.work, env=self.environment(Path("/usr/bin"), {}), check=True)

    def environment(self, programs: Path, variables: Mapping[str, str]) -> dict[str, str]:
        """What a client finds around it."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        away = {f"{kind}_PROXY": NOWHERE for kind in ("HTTP", "HTTPS", "ALL")}
        near = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        lower = {name.lower(): value for name, value in away.items()}
        own = {"HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), "PATH": f"{programs}:{kept['PATH']}"}
        return {**kept, **away, **lower, **near, **OFF, **own, **variables}


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What a client said and how it ended."""

    code: int
    output: str
    errors: str
    took_s: float

    @property
    def shown(self) -> str:
        """The end of what it said."""
        return (self.output + self.errors)[-SHOWN_CHARS:]


@dataclass(frozen=True, slots=True)
class Invocation:
    """A client's command line and what is around it."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    programs: Path = Path("/usr/bin")


def run_client(ground: Ground, how: Invocation, timeout_s: float = RUN_S) -> ClientRun:
    """To its end, or to the end of our patience: then it and its children are killed."""
    started_s = perf_counter()
    process = subprocess.Popen(
        how.words,
        cwd=ground.work,
        env=ground.environment(how.programs, how.variables),
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
    return ClientRun(process.returncode, output, errors, perf_counter() - started_s)


def _kill_all(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def nonce() -> str:
    """A word nobody could guess."""
    return f"quire-{secrets.token_hex(4)}"
