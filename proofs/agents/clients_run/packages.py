"""Installs the clients that proofs run: pinned versions from npm and PyPI, each group in a folder of the cache.

An installed group is reused; if its list of packages has changed, it is installed anew. With QUIRE_CLIENTS=newest, the
newest versions are installed instead, anew in each process. Nothing outside of the cache
folder is written. `python -m proofs.agents.clients_run.packages` installs all of them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.record import say
from quire.checkpoints import cache_folder

INSTALL_S = 1800.0
SHOWN_LINES = 8
NEWEST = "newest"
IS_NEWEST = os.environ.get("QUIRE_CLIENTS") == NEWEST


class NotInstalledError(Exception):
    """The packages of a group could not be installed."""


@dataclass(frozen=True, slots=True)
class PackageGroup:
    """Packages that are installed into one folder."""

    name: str
    source: Literal["npm", "pip"]
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder of the group, installed or not."""
        return cache_folder() / "clients" / self.name

    @property
    def programs(self) -> Path:
        """The folder of the group's programs."""
        return self.folder / ("node_modules/.bin" if self.source == "npm" else "bin")

    @property
    def package(self) -> str:
        """The name of the group's main package, its first."""
        return name_of(self.packages[0])

    def version(self, package: str) -> str:
        """The pinned version of a package; `newest` if it has none."""
        pin = next(line[len(package) :].strip("=@") for line in self.packages if name_of(line) == package)
        return pin or NEWEST

    def unpinned(self) -> "PackageGroup":
        """The same packages in their newest versions, in a folder of its own."""
        packages = tuple(dict.fromkeys(name_of(line) for line in self.packages))
        return replace(self, name=f"{self.name}-{NEWEST}", packages=packages)


def name_of(requirement: str) -> str:
    """The name of a package, without its version."""
    npm_name = requirement[0] + requirement[1:].partition("@")[0]
    return requirement.partition("==")[0] if "==" in requirement else npm_name


_GROUPS = (
    PackageGroup("claude-code", "npm", ("@anthropic-ai/claude-code@2.1.197",)),
    PackageGroup("codex", "npm", ("@openai/codex@0.166.0",)),
    PackageGroup("opencode", "npm", ("opencode-ai@1.18.33",)),
    PackageGroup("qwen-code", "npm", ("@qwen-code/qwen-code@0.15.10",)),
    PackageGroup("continue", "npm", ("@continuedev/cli@1.5.47",)),
    PackageGroup("aider", "pip", ("aider-chat==0.86.2", "litellm==1.81.10", "openai==2.20.0")),
    PackageGroup("llm", "pip", ("llm==0.36",)),
    PackageGroup("openai-agents", "pip", ("openai-agents==0.24.0",)),
    PackageGroup("langchain", "pip", ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7", "langchain")),
    PackageGroup("llama-index", "pip", ("llama-index-llms-openai-like==0.8.1",)),
    PackageGroup("litellm", "pip", ("litellm==1.83.0",)),
    PackageGroup("instructor", "pip", ("instructor==1.17.0",)),
    PackageGroup("pydantic-ai", "pip", ("pydantic-ai-slim[openai]==2.38.0",)),
    PackageGroup(
        "ai-sdk",
        "npm",
        (
            "ai@6.0.326",
            "@ai-sdk/openai-compatible@2.0.87",
            "@ai-sdk/openai@3.0.139",
            "@ai-sdk/anthropic@3.0.138",
            "zod",
        ),
    ),
)
GROUPS: Mapping[str, PackageGroup] = {group.name: group.unpinned() if IS_NEWEST else group for group in _GROUPS}
_installed_now: set[str] = set()
"""Names of the groups in their newest versions that this process has installed."""


def installed(name: str) -> PackageGroup:
    """Get a group, and install it if it is missing. Raises NotInstalledError."""
    group = GROUPS[name]
    marker, packages = group.folder / "installed.txt", "\n".join(group.packages)
    if marker.is_file() and marker.read_text() == packages and (not IS_NEWEST or name in _installed_now):
        return group
    say(f"  installing {', '.join(group.packages)} ...")
    shutil.rmtree(group.folder, ignore_errors=True)
    group.folder.mkdir(parents=True)
    if group.source == "npm":
        _install_npm(group)
    else:
        _install_pip(group)
    marker.write_text(packages)
    _installed_now.add(name)
    return group


def _install_npm(group: PackageGroup) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalledError(f"{group.name} needs npm, which is not installed")
    (group.folder / "package.json").write_text('{"private": true}\n')
    _run([npm, "install", "--no-audit", "--no-fund", "--no-update-notifier", *group.packages], group)


def _install_pip(group: PackageGroup) -> None:
    _run([sys.executable, "-m", "venv", str(group.folder)], group)
    pip = [str(group.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *group.packages], group)


def _run(command: Sequence[str], group: PackageGroup) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        process = subprocess.run(
            command, cwd=group.folder, env=environment, capture_output=True, text=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{group.name} was not installed within {INSTALL_S:.0f} s") from error
    if process.returncode:
        output = "\n".join((process.stdout + process.stderr).splitlines()[-SHOWN_LINES:])
        raise NotInstalledError(f"{group.name} could not be installed:\n{output}")


def main() -> int:
    """Install all groups; the exit code is the number of groups that could not be installed."""
    num_missing = 0
    for name in GROUPS:
        try:
            say(f"{name}: {installed(name).folder}")
        except NotInstalledError as error:
            say(str(error))
            num_missing += 1
    return num_missing


if __name__ == "__main__":
    sys.exit(main())
