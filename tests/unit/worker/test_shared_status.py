"""What a worker was doing, read by its parent."""

import os
import subprocess
import sys

import pytest

from quire.errors import InvariantError
from quire.worker.shared_status import Flight, FlightPage

DIE = """
import os, sys
from quire.worker.shared_status import FlightPage
page = FlightPage(int(sys.argv[1]))
page.beat(12.5)
page.name(["a", "b"])
os.abort()
"""


def test_what_a_worker_named_outlives_its_abort() -> None:
    page = FlightPage.make(4)
    source = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", DIE, str(page.descriptor)]
    run = subprocess.run(command, pass_fds=(page.descriptor,), env={"PYTHONPATH": source}, stderr=subprocess.DEVNULL)
    assert run.returncode < 0
    assert page.read() == Flight(12.5, ("a", "b"))
    page.close()


def test_after_landing_nobody_is_in_flight() -> None:
    page = FlightPage.make(4)
    page.name(["a"])
    page.land()
    page.beat(1.0)
    assert page.read() == Flight(1.0, ())
    page.close()


def test_a_spoilt_page_names_nobody() -> None:
    page = FlightPage.make(4)
    page.name(["a"])
    page._memory[16] = 0xC1
    assert page.read().request_ids == ()
    page._memory[8:16] = b"\xff" * 8
    assert page.read().request_ids == ()
    page.close()


def test_more_names_than_fit_are_a_bug() -> None:
    page = FlightPage.make(1)
    with pytest.raises(InvariantError, match="flight page"):
        page.name(["x" * 40] * 1000)
    page.close()
