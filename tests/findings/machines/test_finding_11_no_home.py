"""Without a home directory a person is told what to set, wherever one is looked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.api.access.keys import add_key

ROOT = Path(__file__).parents[3]

_WITHOUT_HOME = """
import os, pwd, sys

def nobody(_who):
    raise KeyError("no such user")

pwd.getpwuid = pwd.getpwnam = nobody
sys.argv = ["quire", *sys.argv[1:]]
from quire.cli import main
main()
"""


def said_by(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A command of a user whom the system does not know, in a folder of its own."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "LANG")}
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_HOME, *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT / "src"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "variables", "hint"),
    [
        (("config", "show"), {}, "XDG_CONFIG_HOME"),
        (("config", "show"), {"QUIRE_CONFIG": "~/quire.toml"}, "QUIRE_CONFIG"),
        (("models",), {}, "QUIRE_CACHE"),
        (("models",), {"QUIRE_CACHE": "/tmp"}, "HF_HOME"),  # noqa: S108 - named, not written to
        (("serve", "nothing.gguf"), {"QUIRE_CONFIG": "EMPTY"}, "--keys-file"),
        (("serve", "nothing.gguf", "--keys-file", "keys.json"), {"QUIRE_CONFIG": "EMPTY"}, "--admin-socket"),
        (("info", "nothing.gguf"), {"QUIRE_CONFIG": "EMPTY"}, "QUIRE_CACHE"),
        (("info", "org/name"), {"QUIRE_CONFIG": "EMPTY"}, "HF_HOME"),
        (("generate", "org/name", "Hello"), {"QUIRE_CONFIG": "EMPTY", "HF_HUB_OFFLINE": "1"}, "HF_HOME"),
        (("generate", "nothing.gguf", "Hello"), {"QUIRE_CONFIG": "EMPTY"}, "QUIRE_CACHE"),
    ],
)
def test_the_error_says_what_to_set(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], hint: str
) -> None:
    (tmp_path / "empty.toml").touch()
    add_key(tmp_path / "keys.json", "somebody")
    given = {name: value.replace("EMPTY", str(tmp_path / "empty.toml")) for name, value in variables.items()}
    done = said_by(tmp_path, *words, **given)
    assert "Traceback" not in done.stderr, done.stderr[-300:]
    assert done.returncode == 2, done
    assert "set HOME" in done.stderr, done.stderr
    assert hint in done.stderr, done.stderr
    assert not (tmp_path / "~").exists()
