"""Speed beside the commit before is judged by medians of runs that took turns; a proof is run once on a commit."""

from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import proofs.regressions
from proofs.before import HERE
from proofs.proof import Proof
from proofs.regressions import KEPT, Outcome, known_outcome_of, read_outcome, regressions, speed_ratios

OUTCOME = Outcome({"rows": 3, "is_so": True}, frozenset({"rows"}), ("rows 3 at most 2",))


def run(**figures: float) -> dict[str, float | int | bool]:
    return {key: value for key, figure in figures.items() for key, value in ((key, figure), (f"{key}_spread", 0.1))}


def test_one_slow_run_of_three_does_not_count() -> None:
    pairs = [(run(roof_1=0.8), run(roof_1=here)) for here in (0.8, 0.1, 0.8)]
    assert speed_ratios(pairs) == {"roof_1": 1.0}


def test_a_slower_row_is_below_one_even_where_less_is_better() -> None:
    there, here = run(roof_1=0.8, host_share=0.05), run(roof_1=0.4, host_share=0.1)
    assert speed_ratios([(there, here)]) == {"roof_1": 0.5, "host_share": 0.5}


def test_rows_without_a_spread_or_missing_in_a_run_are_left_out() -> None:
    there, here = run(roof_1=0.8, roof_4=0.8), {**run(roof_1=0.8), "step_ms": 3.0}
    assert list(speed_ratios([(there | {"step_ms": 3.0}, here)])) == ["roof_1"]


def test_a_section_that_broke_off_only_here_is_lost_and_a_row_that_is_new_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Outcome({"new_ms": 9.0}, frozenset({"loading: broke off", "new_ms"}))
    outcomes = {True: here, False: Outcome({"load_s": 1.0}, frozenset())}
    monkeypatch.setattr(
        proofs.regressions, "outcome_of", lambda _name, _scale, checkout=HERE, _only=(): outcomes[checkout is HERE]
    )
    monkeypatch.setattr(proofs.regressions, "checked_out", lambda _commit: nullcontext("before"))
    proof = Proof("nothing", "quick", tmp_path)
    regressions(proof, "c0ffee", {"torch": here})
    assert proof.figures["regressions"] == 1


def test_only_the_sections_of_broken_rows_are_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = (
        "queue ...\n  waits    9   at most 2   BROKEN\n  (1 s)\nspeed ...\n  ok_ms    1   at most 2   ok\n"
        "loading ...\n  (1 s)\nbroken: waits, loading: broke off\n"
    )
    outcome = read_outcome("doors", CompletedProcess([], 1, '{"waits": 9, "ok_ms": 1.0}\n', said))
    asked: list[tuple[str, ...]] = []

    def outcome_of(_name: str, _scale: str, checkout: object = HERE, only: tuple[str, ...] = ()) -> Outcome:
        asked.append(only)
        return outcome if checkout is HERE else Outcome({"waits": 1}, frozenset())

    monkeypatch.setattr(proofs.regressions, "outcome_of", outcome_of)
    monkeypatch.setattr(proofs.regressions, "checked_out", lambda _commit: nullcontext("before"))
    proof = Proof("nothing", "quick", tmp_path)
    regressions(proof, "c0ffee", {"doors": outcome})
    assert {*asked} == {("loading", "queue")}
    assert proof.figures["regressions"] == 2


def test_a_row_that_stood_in_another_section_then_is_looked_for_in_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = Outcome({}, frozenset())
    here = Outcome({"waits": 9}, frozenset({"waits"}), sections={"waits": "queue"})
    asked: list[tuple[str, ...]] = []

    def outcome_of(_name: str, _scale: str, checkout: object = HERE, only: tuple[str, ...] = ()) -> Outcome:
        if checkout is HERE:
            return here
        asked.append(only)
        return there if only else Outcome({"waits": 1}, frozenset())

    monkeypatch.setattr(proofs.regressions, "outcome_of", outcome_of)
    monkeypatch.setattr(proofs.regressions, "checked_out", lambda _commit: nullcontext("before"))
    proof = Proof("nothing", "quick", tmp_path)
    regressions(proof, "c0ffee", {"doors": here})
    assert asked == [("queue",), ()]
    assert proof.figures["regressions"] == 1


def test_a_section_that_broke_off_there_alone_was_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Outcome({"waits": 9}, frozenset({"waits"}), sections={"waits": "queue"})
    there = Outcome({}, frozenset({"queue: broke off"}))
    monkeypatch.setattr(proofs.regressions, "outcome_of", lambda *given: here if HERE in given else there)
    monkeypatch.setattr(proofs.regressions, "checked_out", lambda _commit: nullcontext("before"))
    with pytest.raises(RuntimeError, match="proof-doors of the commit before: queue: broke off"):
        regressions(Proof("nothing", "quick", tmp_path), "c0ffee", {"doors": here})


def test_a_proof_that_was_run_on_this_commit_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _counted_runs(monkeypatch, is_changed=False)
    monkeypatch.setenv(KEPT, str(tmp_path))
    assert known_outcome_of("doors") == known_outcome_of("doors") == OUTCOME
    assert runs == ["doors"]
    assert known_outcome_of("memory") == OUTCOME
    assert runs == ["doors", "memory"]


def test_what_is_not_committed_is_always_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _counted_runs(monkeypatch, is_changed=True)
    monkeypatch.setenv(KEPT, str(tmp_path))
    assert known_outcome_of("doors") == known_outcome_of("doors") == OUTCOME
    assert runs == ["doors", "doors"]


def _counted_runs(monkeypatch: pytest.MonkeyPatch, *, is_changed: bool) -> list[str]:
    runs: list[str] = []

    def outcome_of(name: str, scale: str) -> Outcome:
        runs.append(name)
        return OUTCOME

    about = {"commit": "c0ffee", "uncommitted_changes": is_changed}
    monkeypatch.setattr(proofs.regressions, "outcome_of", outcome_of)
    monkeypatch.setattr(proofs.regressions, "circumstances", lambda: about)
    return runs
