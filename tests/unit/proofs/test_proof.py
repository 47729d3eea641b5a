"""The framework of proofs: bounds are kept exactly, and a crash loses one section."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import record
from proofs.framework import proof as framework
from proofs.framework.proof import Proof, Section, run, section, sections_of

NAN = float("nan")


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    return Proof("nothing", "quick", tmp_path)


@section("first")
def first(proof: Proof) -> None:
    proof.equals("first_done", 1, 1)


@section("raises")
def raises(proof: Proof) -> None:
    proof.equals("before_the_crash", 1, 1)
    raise RuntimeError("on purpose")


@section("last asynchronous")
async def last(proof: Proof) -> None:
    proof.equals("last_done", 1, 1)


def test_a_section_that_raises_loses_only_itself(proof: Proof, capsys: pytest.CaptureFixture[str]) -> None:
    assert proof.run([first, raises, last]) == 1
    assert proof.broken == ["raises: broke off"]
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1]) == {"first_done": 1, "before_the_crash": 1, "last_done": 1}
    assert "on purpose" in told.err
    assert told.err.splitlines()[-1] == "broken: raises: broke off"
    assert list(proof.seconds) == ["first", "raises", "last asynchronous"]


def test_only_picks_sections_by_words_of_their_titles(tmp_path: Path) -> None:
    proof = Proof("nothing", "quick", tmp_path, only=("fir", "asynchronous"))
    assert proof.run([first, raises, last]) == 0
    assert list(proof.figures) == ["first_done", "last_done"]


def test_a_title_has_no_comma_because_only_has_commas_between_words() -> None:
    with pytest.raises(ValueError, match="commas"):
        section("one, two")


@pytest.mark.parametrize(
    ("verb", "value", "bound", "holds"),
    [
        ("at_most", 50, 50, True),
        ("at_most", 50.0000001, 50, False),
        ("at_most", -1, 50, True),
        ("at_least", 0.95, 0.95, True),
        ("at_least", 0.9499999, 0.95, False),
        ("equals", 0, 0, True),
        ("equals", 1.0, 1.0, True),
        ("equals", 1, 0, False),
        ("equals", -1, 0, False),
        ("at_most", NAN, 50, False),
        ("at_least", NAN, -50, False),
        ("equals", NAN, NAN, False),
        ("at_most", 1.0, NAN, False),
    ],
)
def test_a_figure_holds_up_to_its_bound_and_nan_never_does(
    proof: Proof, verb: str, value: float, bound: float, holds: bool
) -> None:
    getattr(proof, verb)("key", value, bound)
    assert ("key" not in proof.broken) == holds


def test_a_reported_figure_that_is_no_number_is_broken(proof: Proof) -> None:
    proof.report("fine", math.inf)
    proof.report("lost", NAN)
    assert proof.broken == ["lost"]


def test_a_condition_is_a_figure(proof: Proof) -> None:
    proof.holds("kept", True, "as it should be")
    proof.holds("lost", False, "as it should be")
    assert proof.figures == {"kept": True, "lost": False}
    assert proof.broken == ["lost"]
    assert proof.bounds == {"kept": "as it should be", "lost": "as it should be"}


def test_the_words_of_a_bound_come_from_its_number(proof: Proof) -> None:
    proof.at_most("most", 1, 2_000)
    proof.at_least("least", 1.0, 0.95, "of capacity")
    proof.equals("exact", 0, 0, "blocks held")
    proof.report("told", 4, "the median")
    assert proof.bounds == {"most": "at most 2,000", "least": "at least 0.95: of capacity", "exact": "0: blocks held"}


def test_a_key_that_was_used_is_refused_and_breaks_its_section_off(proof: Proof) -> None:
    proof.report("key", 1)
    with pytest.raises(ValueError, match="'key' was reported before"):
        proof.at_most("key", 1, 2)
    again = Section("again", lambda proof: proof.report("key", 2))
    assert proof.run([again]) == 1
    assert proof.figures == {"key": 1}
    assert proof.broken == ["again: broke off"]


@pytest.mark.parametrize("value", ["1", None, [1]])
def test_a_figure_is_a_number_or_true_or_false(proof: Proof, value: Any) -> None:
    with pytest.raises(TypeError):
        proof.report("key", value)


def test_a_module_has_the_sections_it_defines_and_not_those_it_imports() -> None:
    module = ModuleType(__name__)
    vars(module).update(last=last, first=first, other=1)
    assert sections_of(module) == [last, first]
    importing = ModuleType("elsewhere")
    vars(importing).update(first=first)
    assert sections_of(importing) == []


def test_a_size_is_of_the_scale(tmp_path: Path) -> None:
    assert Proof("nothing", "quick", tmp_path).sized(quick=1, full=2) == 1
    assert Proof("nothing", "full", tmp_path).sized(quick=0.0, full=9.5) == 9.5


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(framework, "PROOF_RESULTS", tmp_path / "results")
    monkeypatch.setattr(framework, "circumstances", lambda: {"commit": "c", "date": "2026-01-02"})
    return tmp_path / "results"


def ran(monkeypatch: pytest.MonkeyPatch, *words: str, parts: tuple[Section, ...] = (first, raises, last)) -> int:
    monkeypatch.setattr("sys.argv", ["proof", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return run("nothing", *parts, paths=("src",))


def test_a_full_run_is_recorded_and_a_part_of_it_is_merged(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(monkeypatch, "--scale", "full") == 1
    whole = json.loads((results / "proof-nothing.json").read_text())
    assert whole["broken"] == ["raises: broke off"]
    assert whole["bounds"] == {"first_done": "1", "before_the_crash": "1", "last_done": "1"}
    monkeypatch.setattr(framework, "circumstances", lambda: {"commit": "d", "date": "2026-01-03"})
    mended = Section("raises", lambda proof: proof.equals("before_the_crash", 2, 2))
    assert ran(monkeypatch, "--scale", "full", "--only", "raises", parts=(first, mended)) == 0
    part = json.loads((results / "proof-nothing.json").read_text())
    assert part["broken"] == []
    assert part["figures"] == {"first_done": 1, "before_the_crash": 2, "last_done": 1}
    assert part["bounds"]["before_the_crash"] == "2"
    assert part["commits"] == {"first": "c", "raises": "d", "last asynchronous": "c"}
    assert part["paths"] == ["src"]


def test_a_quick_run_is_not_recorded(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(monkeypatch, "--only", "first") == 0
    assert not results.exists()


def test_only_with_words_of_no_title_is_a_mistake(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ran(monkeypatch, "--only", "nobody")
    assert ended.value.code == 2
    assert "last asynchronous" in capsys.readouterr().err


def test_a_run_has_a_folder_that_is_gone_with_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def look(proof: Proof) -> None:
        seen.append(proof.folder)
        assert proof.folder.is_dir()

    assert ran(monkeypatch, parts=(Section("looks", look),)) == 0
    assert not seen[0].exists()


def test_records_say_whether_proofs_were_changed_too() -> None:
    assert "proofs/*.py" in record.SOURCES
