"""What is run at an earlier commit is written in the names of that commit, and only there."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.record import ROOT
from proofs.before import BEFORE, HERE, MOVED, Checkout
from proofs.findings_templates import SCRIPT_FILES
from proofs.regressions import MODULES, Outcome, outcome_of, read_outcome

CODE = """\
from quire.api.access import keys
from quire.api.access.keys import KeyRing
from quire.text.tokenizer import Tokenizer
monkeypatch.setattr("quire.api.access.admission.monotonic", now)
import quire.core.request
"""


@pytest.fixture
def earlier(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, HERE.python)


def test_names_of_modules_are_translated_where_the_commit_does_not_have_them(earlier: Checkout) -> None:
    assert earlier.translated(CODE).splitlines() == [
        "from quire.api import keys",
        "from quire.api.keys import KeyRing",
        "from quire.engine.text import Tokenizer",
        'monkeypatch.setattr("quire.api.doors.monotonic", now)',
        "import quire.core.request",
    ]


def test_at_this_commit_nothing_is_translated() -> None:
    assert HERE.translated(CODE) == CODE


def test_every_name_of_the_table_is_one_of_this_commit() -> None:
    assert [name for name in MOVED if not HERE.has(name)] == []


def test_files_are_brought_to_the_same_places(earlier: Checkout) -> None:
    earlier.bring(*SCRIPT_FILES)
    brought = (earlier.root / "proofs" / "chat_ids.py").read_text()
    assert "from quire.engine.text import Tokenizer" in brought
    assert "quire.client" not in brought


def imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def test_all_that_its_scripts_import_was_there_before(earlier: Checkout) -> None:
    words = ["git", "ls-tree", "-r", "--name-only", BEFORE]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the history of this checkout does not go back so far")
    there = set(listed.stdout.splitlines())
    for path in [ROOT / one for one in SCRIPT_FILES]:
        for module in imported(earlier.translated(path.read_text())):
            if module.startswith(("quire.", "tests.")):
                place = module.replace(".", "/")
                places = {f"src/{place}.py", f"src/{place}/__init__.py", f"{place}.py", f"{place}/__init__.py"}
                assert places & there, f"{path.name}: {module}"


def said(code: int, out: str, err: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.CompletedProcess([], code, out, err)


def test_the_outcome_of_a_proof_is_read_from_its_last_lines() -> None:
    err = "  goodput   0.7   at least 0.95   BROKEN\n  fine   1   1   ok\nbroken: goodput, auth: broke off\n"
    outcome = read_outcome("doors", said(1, 'noise\n{"goodput": 0.7, "fine": 1}\n', err))
    assert outcome == Outcome(
        {"goodput": 0.7, "fine": 1},
        frozenset({"goodput", "auth: broke off"}),
        ("goodput   0.7   at least 0.95  ", "auth: broke off"),
    )
    assert outcome.holds("fine")
    assert not outcome.holds("goodput")
    assert not outcome.holds("not there")


def test_a_proof_that_ends_without_a_word_broke_off() -> None:
    assert read_outcome("doors", said(1, "", "Traceback")).broken == {"doors: broke off"}


def test_a_proof_is_run_by_the_name_it_has_there(earlier: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def noted(_checkout: Checkout, words: list[str], _timeout_s: float) -> "subprocess.CompletedProcess[str]":
        started.append(words[1])
        return said(0, "{}", "")

    monkeypatch.setattr(Checkout, "run", noted)
    for checkout in (earlier, HERE):
        outcome_of("doors", checkout=checkout)
    assert started == ["benchmarks.proof_doors", MODULES["doors"]]
