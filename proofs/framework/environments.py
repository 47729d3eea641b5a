"""Virtual environments for proofs: empty, or with the wheel of this commit and its requirements."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.servers import plain_environment


def environment(folder: Path, interpreter: str) -> Path:
    """Make an empty environment in this folder; returns its interpreter."""
    run([interpreter, "-m", "venv", folder])
    return folder / "bin" / "python"


def run(command: Sequence[object], variables: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run a command with these environment variables. Raises RuntimeError if its exit code is not 0."""
    env = {**plain_environment(), **(variables or {})}
    process = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{command}: exit code {process.returncode}: {(process.stdout + process.stderr)[-2000:]}")


def environment_with_wheel(folder: Path, extra: str = "") -> Path:
    """Make an environment with the wheel of this commit and its requirements, and with those of this extra."""
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    (wheel,) = folder.glob("quire-*.whl")
    python = environment(folder / "environment", sys.executable)
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else wheel])
    return python
