"""Which sections of a record are of an older build: the code that they cover has changed since their commit."""

import ast
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from benchmarks.record import ROOT

Record = Mapping[str, Any]
EVERYTHING = ("src", "native")
"""The paths that a record covers if it names none."""


def commits_of(record: Record) -> dict[str, str]:
    """The commit that each section ran on; in a record without `commits`, the oldest that any of its runs had."""
    if commits := record.get("commits"):
        return dict(commits)
    return dict.fromkeys(record["seconds"], record.get("earlier_runs", [record])[0]["commit"])


def older_sections(record: Record) -> list[str]:
    """Titles of the sections that ran before the code under the record's paths changed."""
    paths = tuple(record.get("paths") or EVERYTHING)
    return [title for title, commit in commits_of(record).items() if has_changed(commit, paths)]


@cache
def has_changed(commit: str, paths: tuple[str, ...]) -> bool:
    """Whether code under these paths differs from that commit's, apart from renames, comments and docstrings. True
    too if this clone does not have the commit."""
    changes = _git("diff", "--name-status", "--find-renames", commit, "HEAD", "--", *paths)
    return changes is None or any(not _is_same_code(commit, *line.split("\t")) for line in changes.splitlines())


def _is_same_code(commit: str, status: str, *files: str) -> bool:
    if status == "R100":
        return True
    before, after = _git("show", f"{commit}:{files[0]}"), _git("show", f"HEAD:{files[-1]}")
    is_python = all(file.endswith(".py") for file in files)
    return is_python and before is not None and after is not None and code_of(before) == code_of(after)


def code_of(text: str) -> str:
    """A Python file without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(tree)


def _git(*arguments: str) -> str | None:
    process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if process.returncode else process.stdout
