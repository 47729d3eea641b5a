"""What a worker was doing, read by its parent."""

import os
import subprocess
import sys

from quire.errors import InvariantError
from quire.worker.child.shared_status import SharedStatus, WorkerStatus
from tests.support.errors import raises_code

DIE = """
import os, sys
from quire.worker.child.shared_status import SharedStatus
status = SharedStatus(int(sys.argv[1]))
status.record_heartbeat()
status.record_heartbeat()
status.record_request_ids(["a", "b"])
os.abort()
"""


def test_what_a_worker_named_outlives_its_abort() -> None:
    status = SharedStatus.create(4)
    source = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", DIE, str(status.descriptor)]
    run = subprocess.run(command, pass_fds=(status.descriptor,), env={"PYTHONPATH": source}, stderr=subprocess.DEVNULL)
    assert run.returncode < 0
    assert status.read() == WorkerStatus(2, ("a", "b"))
    status.close()


def test_after_landing_nobody_is_in_flight() -> None:
    status = SharedStatus.create(4)
    status.record_request_ids(["a"])
    status.clear_in_flight()
    status.record_heartbeat()
    assert status.read() == WorkerStatus(1, ())
    status.close()


def test_a_spoilt_page_names_nobody() -> None:
    status = SharedStatus.create(4)
    status.record_request_ids(["a"])
    status.memory[16] = 0xC1
    assert status.read().request_ids == ()
    status.memory[8:16] = b"\xff" * 8
    assert status.read().request_ids == ()
    status.close()


def test_more_names_than_fit_are_a_bug() -> None:
    status = SharedStatus.create(1)
    with raises_code(InvariantError, "invariant_broken"):
        status.record_request_ids(["x" * 40] * 1000)
    status.close()
