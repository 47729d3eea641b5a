"""As the first process of a container, quire answers SIGTERM from the beginning, not only when it serves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

_SIGTERM_WHILE_IMPORTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)
        return None

sys.meta_path.insert(0, Finder())
"""
UNSHARE = shutil.which("unshare") or ""


def may_unshare() -> bool:
    """Whether a process may be the first of a namespace of its own here."""
    return bool(UNSHARE) and subprocess.run([UNSHARE, "--pid", "--fork", "true"], capture_output=True).returncode == 0


def ended_as_first(folder: Path) -> int:
    """How `quire serve` ends if it gets a SIGTERM while it imports the first library of its command line."""
    (folder / "sitecustomize.py").write_text(_SIGTERM_WHILE_IMPORTING)
    command = [UNSHARE, "--pid", "--fork", sys.executable, "-m", "quire", "serve", str(folder / "nothing")]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}"}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode


@pytest.mark.skipif(not may_unshare(), reason="a process id namespace needs unshare and the right to make one")
def test_a_sigterm_in_the_first_second_of_a_container_is_heard(tmp_path: Path) -> None:
    assert ended_as_first(tmp_path) == 128 + 15
