"""Environments of their own, empty or with the wheel of this commit."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.servers import plain_environment


def environment(folder: Path, interpreter: str) -> Path:
    """The interpreter of an empty environment."""
    run([interpreter, "-m", "venv", folder])
    return folder / "bin" / "python"


def run(words: Sequence[object], more: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
    """To its end, which must be good."""
    around = {**plain_environment(), **(more or {})}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=around, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def environment_with_wheel(folder: Path, extra: str = "") -> Path:
    """One with the wheel of this commit and what it requires; perhaps with one of its extras."""
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    (wheel,) = folder.glob("quire-*.whl")
    python = environment(folder / "environment", sys.executable)
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else wheel])
    return python
