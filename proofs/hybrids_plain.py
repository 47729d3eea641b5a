"""What slots cost models that have none: the memory's operations and the scheduler's steps, here and on the commit
before.

Both commits run at once, each in a process of its own on the same core, and work in short turns: the machine drifts
within seconds, so neighbours of a few milliseconds are compared and not runs of a minute.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from benchmarks.record import say
from proofs.before import HERE, Checkout, checked_out
from proofs.proof import Proof, section
from proofs.ratios import spread

BEFORE = "2b272de"
"""The commit before blocks could carry states."""
MOST_RATIO = 1.05
STEPS_OF_A_TURN = 2
WORKER = """
import gc, os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from proofs.memory import block_rate, full_pool, keep_open
from proofs.scheduler import Bench

def steps():
    return sum(decoding.step() for _ in range(STEPS))

def operations():
    return 1.0 / block_rate(pool, 7)

decoding = Bench(256, 0, 4_000)
pool, _ = full_pool(1_000)
keep_open(pool, 100)
gc.collect()
gc.freeze()
turns = {"steps": steps, "operations": operations}
print("ready", flush=True)
for line in sys.stdin:
    print(turns[line.strip()](), flush=True)
"""
"""Reads what to do, a line at a time, and says how long that took."""


class Turns:
    """One commit's process, asked for a turn at a time."""

    def __init__(self, checkout: Checkout) -> None:
        self._process = subprocess.Popen(
            [str(checkout.python), "-c", WORKER.replace("STEPS", str(STEPS_OF_A_TURN))],
            cwd=checkout.root,
            env=checkout.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said()

    def take(self, what: str) -> float:
        """Seconds that one turn took."""
        if self._process.stdin is None:
            raise EOFError("the process has no input")
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._said())

    def end(self) -> None:
        """Let the process go."""
        self._process.kill()
        self._process.communicate()

    def _said(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise EOFError(f"the process ended with {self._process.wait()}")
        return line.strip()


@contextmanager
def _both() -> Iterator[tuple[Turns, Turns]]:
    """The commit before, and this one."""
    with checked_out(BEFORE) as before:
        pair = Turns(before), Turns(HERE)
        try:
            yield pair
        finally:
            for one in pair:
                one.end()


def _ratio(proof: Proof, key: str, pairs: Sequence[tuple[float, float]]) -> float:
    """Here over before, of neighbours; the median of their ratios."""
    ratios = [here / before for before, here in pairs]
    told = f"{median(one for one, _ in pairs) * 1e3:.4g} ms before, {median(one for _, one in pairs) * 1e3:.4g} here"
    proof.report(key, median(ratios), f"{told}; {len(pairs)} turns of each")
    proof.report(f"{key}_spread", spread(ratios))
    return median(ratios)


@section("plain models")
def plain(proof: Proof) -> None:
    """Turn about, the first of a pair changing."""
    pairs: dict[str, list[tuple[float, float]]] = {"steps": [], "operations": []}
    with _both() as (before, here):
        for number in range(proof.sized(quick=40, full=500)):
            for what, found in pairs.items():
                if number % 2:
                    late = here.take(what)
                    found.append((before.take(what), late))
                else:
                    found.append((before.take(what), here.take(what)))
            if number % 100 == 99:
                say(f"  {number + 1} turns")
    slower = [
        _ratio(proof, "plain_plan_ratio", pairs["steps"]),
        _ratio(proof, "plain_ops_ratio", pairs["operations"]),
    ]
    proof.at_most("plain_ratio", max(slower), MOST_RATIO, "the worse of both")
