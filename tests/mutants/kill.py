"""Test the tests: put one hand-written bug into a copy of the source, run the tests on it, and expect them to fail."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from tests.support.servers.other_source import importing_from

ROOT = Path(__file__).parents[2]
SLOWEST_S = 3600.0
"""Longer than the tests take of the unchanged source, on any machine."""
TIMES_LONGER = 10.0
"""A mutant that takes so many times as long as the unchanged source, and at least this long, never ends."""
LEAST_S = 120.0
SOURCE = ROOT / "src" / "quire"
WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: in a function of `file` the text `old`, which stands there exactly once, becomes `new`.

    White space in `old` stands for any. Further lines of `new` are indented as much as the first one.
    """

    name: str
    file: str
    function: str
    """With its class, such as `Scheduler.plan`; or a constant's name."""
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        first, last = lines_of(self.function, text)
        lines = text.splitlines(keepends=True)
        before, within, after = ("".join(part) for part in (lines[:first], lines[first:last], lines[last:]))
        found = [*_anywhere(self.old).finditer(within)]
        if len(found) != 1:
            place = f"{self.file}::{self.function}"
            raise LookupError(f"mutant {self.name!r}: expected its text once in {place}, found it {len(found)} times")
        start, end = found[0].span()
        line = within[within.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        return before + within[:start] + self.new.replace("\n", f"\n{indent}") + within[end:] + after


def lines_of(function: str, text: str) -> tuple[int, int]:
    """From which line of a file to which a function or a constant goes, the last one excluded."""
    nodes: list[ast.stmt] = ast.parse(text).body
    for name in function.split("."):
        found = [node for node in nodes if name in _names(node)]
        if len(found) != 1:
            raise LookupError(f"expected one {function}, found {len(found)} of {name}")
        nodes = getattr(found[0], "body", [])
    decorators = getattr(found[0], "decorator_list", [])
    return min(one.lineno for one in (found[0], *decorators)) - 1, found[0].end_lineno or found[0].lineno


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
        case _:
            return []


def _anywhere(old: str) -> re.Pattern[str]:
    """The same words and signs with any white space between them."""
    return re.compile(re.sub(r"(?<=\w)\\s\*(?=\w)", r"\\s+", r"\s*".join(map(re.escape, WORDS.findall(old)))))


def survivors(mutants: Iterable[Mutant], tests: Sequence[str], *, jobs: int = 2) -> list[str]:
    """The names of the mutants that these tests do not notice. The unchanged source must pass them first."""
    started_s = monotonic()
    if _fails(None, tests, SLOWEST_S):
        raise RuntimeError(f"the tests {list(tests)} fail without any mutant")
    timeout_s = max(LEAST_S, TIMES_LONGER * (monotonic() - started_s))
    listed = list(mutants)
    with ThreadPoolExecutor(jobs) as pool:
        killed = list(pool.map(lambda mutant: _fails(mutant, tests, timeout_s), listed))
    return [mutant.name for mutant, noticed in zip(listed, killed, strict=True) if not noticed]


def _fails(mutant: Mutant | None, tests: Sequence[str], timeout_s: float) -> bool:
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "quire"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            file = copy / mutant.file
            file.write_text(mutant.applied_to(file.read_text()))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "--hypothesis-seed=0"]
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=ROOT,
                # Plugins that are merely installed take longer to load than these tests to run.
                env=importing_from(Path(folder)) | {"QUIRE_TESTED_FROM": folder, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            # A bug that never ends is noticed as well.
            return True
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run: exit {run.returncode}\n{run.stdout}\n{run.stderr}")
    return run.returncode == 1
