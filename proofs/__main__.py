"""`make proof-all`: every proof, each in a process of its own, and one table of the rows that do not hold.

`--only` takes names of proofs; `regressions`, rows that held at the commit `HELD` and do not now; and `turn about`, the
native path's speed over that commit's.
"""

import sys

from benchmarks.record import say
from proofs.proof import Proof, Section, run, section
from proofs.regressions import MODULES, Outcome, known_outcome_of, native_speed, regressions

HELD = "e75fa43"
"""The commit whose rows must still hold."""
OUTCOMES: dict[str, Outcome] = {}
"""What the proofs of this run said."""


def whole(name: str) -> Section:
    """A proof as a section of this one."""

    def prove(proof: Proof) -> None:
        outcome = OUTCOMES[name] = known_outcome_of(name, proof.scale)
        proof.report(f"{name}_rows", len(outcome.figures))
        proof.equals(f"{name}_broken", len(outcome.broken), 0)

    return Section(name, prove)


@section("regressions")
def rows_lost(proof: Proof) -> None:
    """Broken rows of this run that the commit before keeps."""
    regressions(proof, HELD, OUTCOMES, proof.scale)


@section("turn about")
def timed_rows(proof: Proof) -> None:
    """The native path is as fast as it was."""
    native_speed(proof, HELD)


def main() -> int:
    """Run them, print the table, and return the exit code."""
    code = run("all", *map(whole, MODULES), rows_lost, timed_rows)
    num_broken = sum(len(outcome.broken) for outcome in OUTCOMES.values())
    say(f"rows that do not hold, in {len(OUTCOMES)} proofs: {num_broken}")
    for name, outcome in OUTCOMES.items():
        for row in outcome.table:
            say(f"  {name:10} {row}")
    return code


if __name__ == "__main__":
    sys.exit(main())
