"""A record is of an older build where code that it speaks of has changed since its commit."""

import subprocess
from pathlib import Path

import pytest

from proofs.framework import builds

CODE = "".join(f"def number_{at}() -> int:\n    return {at}\n\n\n" for at in range(20))
"""Long enough that git sees where it has moved."""


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a repository with one file of code, which `changed` changes."""
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    builds.has_changed.cache_clear()
    git(tmp_path, "init", "--quiet")
    changed(tmp_path, "src/room/one.py", CODE)
    return git(tmp_path, "rev-parse", "HEAD")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def changed(folder: Path, file: str, text: str) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change")


def older(commit: str) -> list[str]:
    return builds.older_sections({"paths": ["src/room"], "commits": {"first": commit}})


def test_a_change_of_code_makes_a_record_old(tmp_path: Path, commit: str) -> None:
    changed(tmp_path, "src/room/one.py", CODE.replace("return 1\n", "return 2\n"))
    assert older(commit) == ["first"]


def test_a_new_file_of_these_paths_makes_a_record_old(tmp_path: Path, commit: str) -> None:
    changed(tmp_path, "src/room/two.py", CODE.replace("number", "digit"))
    assert older(commit) == ["first"]


def test_words_renames_and_other_paths_do_not(tmp_path: Path, commit: str) -> None:
    changed(tmp_path, "src/room/one.py", '"""A page."""\n' + CODE.replace("return 1\n", "return 1  # one\n"))
    git(tmp_path, "mv", "src/room/one.py", "src/room/first.py")
    changed(tmp_path, "src/hall/two.py", CODE)
    assert older(commit) == []


def test_a_commit_that_is_not_here_is_old(commit: str) -> None:
    assert older("0" * 40) == ["first"]


def test_a_record_without_paths_speaks_of_the_whole_source(tmp_path: Path, commit: str) -> None:
    record = {"seconds": {"first": 1.0}, "commit": commit}
    assert builds.older_sections(record) == []
    changed(tmp_path, "src/hall/two.py", CODE)
    builds.has_changed.cache_clear()
    assert builds.older_sections(record) == ["first"]
