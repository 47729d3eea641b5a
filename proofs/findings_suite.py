"""The suite itself: no failure on a busy machine, and how long it takes on a quiet one.

`suite_failures`: the whole suite three times, beside as many programs that never rest as there are cores.
`suite_s`: the whole suite once, with coverage, as CI runs it, while nothing else does.
At quick scale both are of a part, run once: the tests that wait for other threads and processes or measure time
(`TIMED`). Only the full scale says anything about the whole.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.record import ROOT, say
from proofs.proof import Proof, section

SPIN = "while True: pass"
TIMED = (
    "tests/api/test_entering.py",
    "tests/api/test_leaving.py",
    "tests/api/test_limits.py",
    "tests/perf",
    "tests/unit/bench",
    "tests/unit/client/test_engines.py",
)
PARALLEL = ("--numprocesses", "2", "--dist", "loadfile")
"""As `make test` runs it."""
INSIDE = "SUITE_OF_A_PROOF"
"""Set for the suite that is run here: a proof that it started would start the suite again, without end."""
COUNTED = re.compile(r"(\d+) (passed|failed|error)")
TELLING = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """How one run of the tests went."""

    num_passed: int
    num_failed: int
    seconds: float


@section("suite beside a busy program")
def busy(proof: Proof) -> None:
    paths = () if proof.is_full else TIMED
    with spinning(os.cpu_count() or 1):
        runs = [run_suite(*paths) for _ in range(proof.sized(quick=1, full=3))]
    num_failed = sum(one.num_failed for one in runs)
    proof.report("suite_busy_runs", len(runs))
    proof.report("suite_busy_tests", min(one.num_passed + one.num_failed for one in runs), "in each run")
    proof.report("suite_busy_s", max(one.seconds for one in runs), "the longest")
    proof.equals("suite_failures", num_failed, 0, "beside programs that keep all cores busy")


@section("suite on a quiet machine")
def quiet(proof: Proof) -> None:
    run = run_suite("--cov", "--cov-report=") if proof.is_full else run_suite(*TIMED)
    proof.equals("suite_quiet_failures", run.num_failed, 0)
    proof.report("suite_tests", run.num_passed + run.num_failed)
    proof.at_most("suite_s", run.seconds, 900, "" if proof.is_full else "here of a part")


def run_suite(*words: str) -> SuiteRun:
    """Run the tests as a developer does. Raises RuntimeError if they did not run to their end."""
    if INSIDE in os.environ:
        raise RuntimeError("the suite of a proof must not start the proof of the suite")
    with TemporaryDirectory() as folder:
        environment = os.environ | {INSIDE: "1", "COVERAGE_FILE": str(Path(folder) / "coverage")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PARALLEL, *words]
        started_s = time.monotonic()
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - started_s
    for line in TELLING.findall(run.stdout):
        say(f"  {line}")
    return counted(run.returncode, run.stdout, seconds)


def counted(code: int, told: str, seconds: float) -> SuiteRun:
    """What pytest's last lines say. A run that was broken off, or failed without a failing test, is not believed."""
    found = [(int(number), what) for number, what in COUNTED.findall(_last_line(told))]
    num_passed = sum(number for number, what in found if what == "passed")
    num_failed = sum(number for number, what in found if what != "passed")
    if code not in (0, 1) or not num_passed or (code == 1) != (num_failed > 0):
        raise RuntimeError(f"the suite did not run to its end: code {code}\n{told[-3000:]}")
    return SuiteRun(num_passed, num_failed, seconds)


def _last_line(told: str) -> str:
    """The line with the counts; coverage may say something after it."""
    lines = [line for line in told.splitlines() if COUNTED.search(line) and " in " in line]
    return lines[-1] if lines else ""


@contextmanager
def spinning(num_programs: int) -> Iterator[None]:
    """So many programs that never rest, for as long as the block runs."""
    programs: Sequence[subprocess.Popen[bytes]] = [
        subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num_programs)
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
        for program in programs:
            program.wait()
