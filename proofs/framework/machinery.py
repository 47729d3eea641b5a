"""Parts that several proofs share: Hypothesis state machines on all cores, JSON from child processes, and mutants."""

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
    """A state machine class that counts the steps of all its instances."""

    num_steps: int


def state_machines(proof: Proof, machine: type[RuleBasedStateMachine], num_steps: int) -> None:
    """Run a machine for this many steps, with fresh seeds, and report steps and failures."""
    dice = SystemRandom()
    jobs = [dice.getrandbits(63) for _ in range(-(-num_steps // STEPS_OF_A_JOB))]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        results = list(pool.map(partial(_one_state_machine, machine), jobs))
    failures = [failure for _, failure in results if failure]
    num_done = sum(count for count, _ in results)
    proof.at_least("state_machine_steps", num_done, num_steps)
    proof.none("state_machine_failures", failures)


def _one_state_machine(machine: type[RuleBasedStateMachine], number: int) -> tuple[int, str]:
    counter: CountingMachine = machine  # type: ignore[assignment]
    start = counter.num_steps
    options = settings(
        max_examples=50, stateful_step_count=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    while counter.num_steps - start < STEPS_OF_A_JOB:
        number += 1
        subclass = type("Machine", (machine,), {})
        try:
            run_state_machine_as_test(seed(number)(subclass), settings=options)
        except Exception as error:
            return counter.num_steps - start, f"state machine, seed {number}: {error!r}"
    return counter.num_steps - start, ""


def json_from_child(module: str, *arguments: object) -> dict[str, Any] | None:
    """The JSON object that `python -m module` prints last; None, with a message on stderr, if it fails."""
    command = ["-m", module, *map(str, arguments)]
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=600)
    if process.returncode:
        say(f"  {' '.join(command[1:])}: exit code {process.returncode}: {process.stderr[-300:]}")
        return None
    output: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return output


def mutants_section(*lists: ModuleType, quick: int, full: int, every: int = 1) -> Section:
    """Put each bug of these lists (at quick scale one in `every`) into a copy of the source: do the tests fail? There
    must be at least `quick` or `full` bugs."""

    def prove(proof: Proof) -> None:
        mutants = [mutant for module in lists for mutant in module.MUTANTS][:: 1 if proof.is_full else every]
        tests = dict.fromkeys(test for module in lists for test in module.TESTS)
        for name in (names := survivors(mutants, [*tests], jobs=NUM_PROCESSES)):
            say(f"  survived: {name}")
        proof.at_least("mutants_total", len(mutants), proof.sized(quick=quick, full=full))
        proof.equals("mutants_killed", len(mutants) - len(names), len(mutants), "all of them")

    return Section("mutants", prove)
