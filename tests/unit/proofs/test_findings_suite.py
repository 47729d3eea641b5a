"""The proof of the suite counts what pytest says, and believes no run that did not end."""

import subprocess
import sys

import pytest

from proofs import findings_suite
from proofs.findings_suite import SuiteRun, counted, run_suite, spinning


@pytest.mark.parametrize(
    ("code", "told", "expected"),
    [
        (0, "....\n4 passed in 1.00s\n", SuiteRun(4, 0, 2.0)),
        (1, "FAILED a\n2 failed, 7 passed, 1 skipped, 3 errors in 61.00s (0:01:01)\n", SuiteRun(7, 5, 2.0)),
        (0, "4 passed in 1.00s\nRequired test coverage of 100% reached.\n", SuiteRun(4, 0, 2.0)),
    ],
)
def test_failed_and_broken_tests_are_counted(code: int, told: str, expected: SuiteRun) -> None:
    assert counted(code, told, 2.0) == expected


@pytest.mark.parametrize(("code", "told"), [(2, "4 passed in 1s"), (0, "no tests ran in 0.1s"), (1, "4 passed in 1s")])
def test_a_run_that_did_not_end_is_not_believed(code: int, told: str) -> None:
    with pytest.raises(RuntimeError, match="did not run to its end"):
        counted(code, told, 1.0)


def test_a_suite_that_a_proof_started_does_not_start_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(findings_suite.INSIDE, "1")
    with pytest.raises(RuntimeError, match="must not start"):
        run_suite()


def test_busy_programs_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    really = subprocess.Popen

    def noted(command: list[str]) -> "subprocess.Popen[bytes]":
        started.append(really(command))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with spinning(2):
        assert [one.poll() for one in started] == [None, None]
    assert all(one.returncode is not None for one in started)
    assert started[0].args == [sys.executable, "-c", findings_suite.SPIN]
