"""Environments for the official SDKs, made once in the cache folder, without quire: one for each language.

The cases of `sdk_cases` run there.
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
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Cases:
    """The results of the cases in one language."""

    num_calls: int
    num_stops: int
    """Cases with a stop string that is known to be in the answer."""
    num_refused: int
    kinds: dict[str, int]
    versions: dict[str, str]
    wrong: list[str]

    @property
    def count(self) -> int:
        """The number of cases of all kinds."""
        return sum(self.kinds.values())


def cases_of(server: Server, command: list[str], fields: dict[str, Any]) -> Cases:
    """Run cases against a server; `fields` are the input of `sdk_cases`."""
    job = json.dumps({"count": 0, "num_cases": 0, "limited": [], **fields, "url": server.url})
    process = subprocess.run(command, input=job, capture_output=True, text=True, timeout=TIMEOUT_S)
    if process.returncode:
        return Cases(0, 0, 0, {}, {}, [f"{command[0]} ended with {process.returncode}: {process.stderr[-800:]}"])
    return Cases(**json.loads(process.stdout.splitlines()[-1]))


def python_command(_folder: Path) -> list[str]:
    """The command that runs the cases in Python; installs the SDKs if they are missing."""
    folder = _folder_of("python", PYTHON)
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *PYTHON)
        (folder / "installed").touch()
    return [str(folder / "bin" / "python"), str(HERE / "sdk_cases.py")]


def javascript_command(folder: Path) -> list[str]:
    """The command that runs the cases in JavaScript. The module is copied, to stand beside its packages."""
    packages = _folder_of("javascript", JAVASCRIPT)
    if not (packages / "installed").exists():
        shutil.rmtree(packages, ignore_errors=True)
        packages.mkdir(parents=True)
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(packages), *JAVASCRIPT)
        (packages / "installed").touch()
    run_folder = folder / "javascript"
    if not run_folder.exists():
        run_folder.mkdir()
        (run_folder / "node_modules").symlink_to(packages / "node_modules")
    script = shutil.copy(HERE / "sdk_cases.mjs", run_folder)
    return ["node", "--preserve-symlinks-main", str(script)]


LANGUAGES = {"python": python_command, "javascript": javascript_command}


def commands(folder: Path) -> dict[str, list[str]]:
    """Language -> the command that runs the cases."""
    return {name: make(folder) for name, make in LANGUAGES.items()}


def _folder_of(language: str, packages: tuple[str, ...]) -> Path:
    """The folder for these versions of the packages."""
    names = "-".join(package.strip("@").replace("/", "-") for package in packages)
    return cache_folder() / "sdks" / f"{language}-{names}"


def _run(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {process.returncode}: {process.stderr[-800:]}")
