"""`make proof-findings`: defects found by attacking a running server, each shown to be mended, over real sockets.

Every finding has a test that fails on the commit before the mending and passes now; the other sections stand with their
topics in `findings_*.py`.

The tests in `tests/findings/` use only what was there before, so they can be run on both commits. On the commit before
each must fail by what it asserts; a test that cannot even be imported there shows nothing and counts as none.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from benchmarks.record import ROOT, say
from proofs import (
    findings_access,
    findings_lists,
    findings_promises,
    findings_queue,
    findings_suite,
    findings_templates,
    findings_worker,
)
from proofs.before import BEFORE, HERE, Checkout, checked_out
from proofs.proof import Proof, run, section
from proofs.regressions import rows_lost_since

TOPICS = (
    findings_access,
    findings_templates,
    findings_queue,
    findings_lists,
    findings_worker,
    findings_promises,
    findings_suite,
)
TESTS = Path("tests/findings")
TIMEOUT_S = 3600.0
NOT_SHOWN = ("ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "SyntaxError", "collection failure")
"""What a test says that could not be run at all."""

FINDINGS: Mapping[str, str] = {
    "01_one_key_stalls_everybody": "1: text was worked on before it was charged, in one pool for all keys",
    "01_prompt_bytes": "1: prompts were bounded in characters and tokenised far beyond the longest sequence",
    "02_forged_roles": "2: names of control tokens in a client's text became control tokens",
    "03_one_key_fills_the_queue": "3: one key filled the queue for everyone",
    "04_template_freezes": "4: a model's template could freeze or fill the whole server",
    "05_token_lists": "5: lists of tokens were built anew for every row at every step",
    "06_prompt_logprobs": "6: alternatives were found row by row, and nothing bounded the answer",
    "07_ended_answers": "7: answers that had ended were computed on",
    "08_ending_while_downloading": "8: SIGTERM did nothing while a model was downloaded",
    "09_paused_container": "9: a paused container killed its healthy worker",
    "10_false_431": "10: a body and the next head in one read were a false 431",
    "11_no_home": "11: without a home directory there was a traceback",
    "12_descriptors": "12: connections were not bounded by the descriptors there are",
    "13_mutants": "13: mutation runs did not test the mutant on a fresh install",
    "14_small_things": "14: the last line of loading, and estimates for float32 only",
    "15_foreign_pages": "15: any web page could drive a server without keys",
    "b_duplicate_headers": "B: a header that stands twice was read differently in two places",
    "b_first_process": "B: as the first process of a container SIGTERM was dropped in the first second",
    "b_keys_without_descriptors": "B: without a descriptor for the keys file everybody was locked out",
    "b_two_containers": "B: one container removed the folder of another's live worker",
    "c_busy_machine": "C: tests failed because something took longer than a second",
    "house_promises": "promises of the front page that no user could reach",
}
"""Each finding by its file in `tests/findings/`, without `test_finding_` and `.py`."""


@section("findings")
def findings_open(proof: Proof) -> None:
    """Report how many findings have no test that fails before and passes now."""
    now = _ran(HERE)
    with checked_out(BEFORE) as before:
        then = _before(before)
    without = [name for name in FINDINGS if not _is_closed(name, now, then)]
    for name in without:
        say(f"  open: {name}: {FINDINGS[name]}")
        say(f"    now {now.get(name)}, before {then.get(name)}")
    proof.report("findings", len(FINDINGS))
    proof.equals("findings_open", len(without), 0)


def _is_closed(name: str, now: Mapping[str, list[str]], then: Mapping[str, list[str]]) -> bool:
    """All its tests pass now, and one of them failed before by what it asserts."""
    passes = bool(now.get(name)) and all(one == "passed" for one in now[name])
    return passes and "failed" in then.get(name, ())


def _before(checkout: Checkout) -> dict[str, list[str]]:
    rmtree(checkout.root / TESTS, ignore_errors=True)
    checkout.bring(*(str(path.relative_to(ROOT)) for path in (ROOT / TESTS).rglob("*.py")))
    return _ran(checkout)


def _ran(checkout: Checkout) -> dict[str, list[str]]:
    """What became of each finding's tests in this checkout."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        checkout.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(TESTS)], TIMEOUT_S)
        tree = ElementTree.parse(report)  # noqa: S314 - pytest's own report
    told: dict[str, list[str]] = {}
    for case in tree.iter("testcase"):
        module = next((part for part in case.get("classname", "").split(".") if part.startswith("test_finding_")), "")
        told.setdefault(module.removeprefix("test_finding_"), []).append(_verdict(case))
    return told


def _verdict(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    if failure is not None:
        said = failure.get("message", "")
        return "could not run" if said.startswith(NOT_SHOWN) else "failed"
    if case.find("error") is not None:
        return "could not run"
    return "skipped" if case.find("skipped") is not None else "passed"


if __name__ == "__main__":
    sys.exit(run("findings", findings_open, *TOPICS, rows_lost_since(BEFORE)))
