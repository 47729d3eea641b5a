"""Environments of their own for the official SDKs, made once in the cache folder: nothing of quire is in them.

The cases run there (`sdk_cases`), in each language.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proofs.api.load import Server
from quire.checkpoints import cache_folder

PYTHON = ("openai==3.3.0", "anthropic==2.8.0")
JAVASCRIPT = ("openai@7.55.0", "@anthropic-ai/sdk@1.9.0", "zod@4")
HERE = Path(__file__).parent
PATIENCE_S = 3600


@dataclass(frozen=True, slots=True)
class Cases:
    """What one language came to."""

    num_calls: int
    num_stops: int
    """Cases with a stop that is known to be in the answer."""
    num_refused: int
    kinds: dict[str, int]
    versions: dict[str, str]
    wrong: list[str]

    @property
    def count(self) -> int:
        """Cases of all kinds."""
        return sum(self.kinds.values())


def cases_of(server: Server, command: list[str], what: dict[str, Any]) -> Cases:
    """Run these cases at this server."""
    words = json.dumps({"count": 0, "num_cases": 0, "limited": [], **what, "url": server.url})
    done = subprocess.run(command, input=words, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        return Cases(0, 0, 0, {}, {}, [f"{command[0]} ended with {done.returncode}: {done.stderr[-800:]}"])
    return Cases(**json.loads(done.stdout.splitlines()[-1]))


def python_command(_folder: Path) -> list[str]:
    """What runs the cases in Python."""
    folder = _named("python", PYTHON)
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PYTHON)
        (folder / "installed").touch()
    return [str(folder / "bin" / "python"), str(HERE / "sdk_cases.py")]


def javascript_command(folder: Path) -> list[str]:
    """The same in JavaScript. A module finds its packages beside itself, so it is copied."""
    packages = _named("javascript", JAVASCRIPT)
    if not (packages / "installed").exists():
        shutil.rmtree(packages, ignore_errors=True)
        packages.mkdir(parents=True)
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(packages), *JAVASCRIPT)
        (packages / "installed").touch()
    own = folder / "javascript"
    if not own.exists():
        own.mkdir()
        (own / "node_modules").symlink_to(packages / "node_modules")
    script = shutil.copy(HERE / "sdk_cases.mjs", own)
    return ["node", "--preserve-symlinks-main", str(script)]


LANGUAGES = {"python": python_command, "javascript": javascript_command}


def commands(folder: Path) -> dict[str, list[str]]:
    """What runs the cases, by language."""
    return {name: make(folder) for name, make in LANGUAGES.items()}


def _named(language: str, packages: tuple[str, ...]) -> Path:
    """A folder for these versions and no others."""
    names = "-".join(one.strip("@").replace("/", "-") for one in packages)
    return cache_folder() / "sdks" / f"{language}-{names}"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {done.stderr[-800:]}")
