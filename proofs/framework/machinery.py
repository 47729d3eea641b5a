"""Parts that several proofs share: state machines on all cores, and mutants."""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import SystemRandom
from types import ModuleType
from typing import Any, Protocol

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from benchmarks.record import ROOT, say
from proofs.framework.proof import Proof, Section
from tests.mutants.kill import survivors

NUM_PROCESSES = os.cpu_count() or 1
STEPS_OF_A_JOB = 5_000


class CountingMachine(Protocol):
    """A state machine class that counts its steps on itself."""

    num_steps: int


def state_machines(proof: Proof, machine: type[RuleBasedStateMachine], num_steps: int) -> None:
    """Run a machine for this many steps, with fresh seeds, and report steps and failures."""
    dice = SystemRandom()
    jobs = [dice.getrandbits(63) for _ in range(-(-num_steps // STEPS_OF_A_JOB))]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        results = list(pool.map(partial(_one_state_machine, machine), jobs))
    failures = [story for _, story in results if story]
    done = sum(count for count, _ in results)
    proof.at_least("state_machine_steps", done, num_steps)
    proof.none("state_machine_failures", failures)


def _one_state_machine(machine: type[RuleBasedStateMachine], number: int) -> tuple[int, str]:
    counting: CountingMachine = machine  # type: ignore[assignment]
    start = counting.num_steps
    quiet = settings(
        max_examples=50, stateful_step_count=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    while counting.num_steps - start < STEPS_OF_A_JOB:
        number += 1
        fresh = type("Machine", (machine,), {})
        try:
            run_state_machine_as_test(seed(number)(fresh), settings=quiet)
        except Exception as error:
            return counting.num_steps - start, f"state machine, seed {number}: {error!r}"
    return counting.num_steps - start, ""


def told_by_child(module: str, *words: object) -> dict[str, Any] | None:
    """What a process of its own says in its last line; None, and why is said, if it did not come to its end."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    if done.returncode:
        say(f"  {module} {' '.join(map(str, words))}: exit code {done.returncode}: {done.stderr[-300:]}")
        return None
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def mutants_section(*lists: ModuleType, quick: int, full: int, every: int = 1) -> Section:
    """Bugs are put in one by one, at quick scale one of `every`: how many do the tests notice? At least so many are
    tried."""

    def prove(proof: Proof) -> None:
        chosen = [mutant for one in lists for mutant in one.MUTANTS][:: 1 if proof.is_full else every]
        alive = survivors(chosen, [*dict.fromkeys(test for one in lists for test in one.TESTS)], jobs=NUM_PROCESSES)
        for name in alive:
            say(f"  survived: {name}")
        proof.at_least("mutants_total", len(chosen), proof.sized(quick=quick, full=full))
        proof.equals("mutants_killed", len(chosen) - len(alive), len(chosen), "all of them")

    return Section("mutants", prove)
