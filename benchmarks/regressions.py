"""Rows of the other proofs that held and do not now.

Each proof runs once at its quick scale. A proof with a broken row is run again, turn about with the commit before:
a row that counts (mismatches, losses, violations) regressed if it holds there and is broken here; a row that is timed
or drawn must be broken here and hold there three times in a row, because the machine is shared.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.before import Checkout, checked_out
from benchmarks.proof import ROOT, Figure, Proof, say

PROOFS = ("memory", "scheduler", "engine", "torch", "worker", "doors", "bench", "native")
ROUNDS = 3
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a proof said."""

    figures: dict[str, Figure]
    broken: frozenset[str]

    def holds(self, key: str) -> bool:
        """The row was there and was kept."""
        return key in self.figures and key not in self.broken


def regressions(proof: Proof, commit: str, names: Sequence[str] = PROOFS) -> None:
    """Report `regressions` over these proofs."""
    suspects = {name: outcome.broken for name in names if (outcome := _here(name)).broken}
    lost: list[str] = []
    if suspects:
        with checked_out(commit) as before:
            for name, keys in suspects.items():
                lost += _lost(name, keys, before)
    for row in lost:
        say(f"  regressed: {row}")
    proof.report("regression_proofs", len(names))
    proof.report("regressions", len(lost), "0", holds=not lost)


def _lost(name: str, keys: frozenset[str], before: Checkout) -> list[str]:
    """Those of these broken rows that the commit before keeps."""
    pairs: list[tuple[Outcome, Outcome]] = []
    left = set(keys)
    while left and len(pairs) < ROUNDS:
        there, here = _there(name, before), _here(name)
        pairs.append((there, here))
        left = {key for key in left if _is_lost_so_far(key, pairs)}
        say(f"  {name}, round {len(pairs)}: broken here and kept before: {', '.join(sorted(left)) or 'nothing'}")
        if left and all(_is_counted(key, here) for key in left):
            break
    return [f"{name}: {key}" for key in sorted(left)]


def _is_lost_so_far(key: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> bool:
    return all(there.holds(key) and not here.holds(key) for there, here in pairs)


def _is_counted(key: str, outcome: Outcome) -> bool:
    """Whole numbers are counted, and need no second look."""
    return isinstance(outcome.figures.get(key), int)


def _here(name: str) -> Outcome:
    say(f"  proof-{name} ...")
    ran = subprocess.run(_words(sys.executable, name), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    return _outcome(name, ran)


def _there(name: str, before: Checkout) -> Outcome:
    say(f"  proof-{name} of the commit before ...")
    return _outcome(name, before.run(_words("", name)[1:], TIMEOUT_S))


def _words(python: str, name: str) -> list[str]:
    return [python, "-m", f"benchmarks.proof_{name}", "--scale", "quick"]


def _outcome(name: str, ran: "subprocess.CompletedProcess[str]") -> Outcome:
    """The figures are the last line on stdout; what broke is the last line on stderr that says so."""
    lines = ran.stdout.strip().splitlines()
    figures = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    told = [line for line in ran.stderr.splitlines() if line.startswith("broken: ")]
    broken = frozenset(told[-1].removeprefix("broken: ").split(", ")) if told else frozenset()
    if ran.returncode and not broken:
        say(ran.stderr[-3000:])
        broken = frozenset({f"{name}: broke off"})
    return Outcome(figures, broken)
