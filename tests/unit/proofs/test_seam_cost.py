"""What a process spends, and one figure here over another there."""

import os
import subprocess
import sys

import pytest

from proofs.seam_cost import Ratios, Spent, in_turn, spent_by, typical

SPIN = "import time\nwhile time.process_time() < {}: pass\n"
BUSY = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SPIN.format(0.5)!r} + "input()"], stdin=subprocess.PIPE)
{SPIN.format(0.2)}
print("busy", flush=True)
input()
child.communicate(b"\\n")
"""


def test_a_process_spends_by_itself_and_with_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        spent = spent_by(process.pid)
        while spent.whole - spent.server < 500.0:
            spent = spent_by(process.pid)
        process.communicate(b"\n")
    assert spent.server >= 200.0
    gone = spent_by(process.pid)
    assert (gone.server, gone.whole) == (0.0, 0.0)
    assert spent_by(os.getpid()).server > 0.0


def test_servers_are_asked_turn_about() -> None:
    order: list[str] = []

    def ask(name: str) -> Spent:
        order.append(name)
        return Spent(float(len(order)), 0.0)

    taken = in_turn({"before": "b", "here": "h"}, 3, ask)
    assert "".join(order) == "bhhbbh"
    assert [one.server for one in taken["here"]] == [2.0, 3.0, 6.0]


def test_a_ratio_is_the_median_of_neighbours() -> None:
    taken = {"here": [Spent(at, 1.0) for at in (2.0, 4.0, 9.0)], "before": [Spent(at, 2.0) for at in (1.0, 4.0, 3.0)]}
    found = Ratios.of(taken, lambda one: one.server)
    assert found == Ratios(4.0, 3.0, (2.0, 1.0, 3.0))
    assert found.spread == pytest.approx(2.0)
    assert typical(taken["here"]) == Spent(4.0, 1.0)
    assert Spent(4.0, 8.0) / 4 - Spent(1.0, 1.0) == Spent(0.0, 1.0)
