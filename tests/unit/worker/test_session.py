"""What a supervisor sees of one worker: progress by beats and layers, and when their absence says something."""

import asyncio
from typing import Any

from quire.worker.child.shared_status import StepInFlight, WorkerStatus
from quire.worker.parent.session import WorkerSession
from quire.worker.parent.supervisor import State
from tests.unit.worker.test_supervisor_alone import made


class Page:
    """A worker's process, of which only the shared page is there."""

    def __init__(self, status: WorkerStatus) -> None:
        self.page = status

    def status(self) -> WorkerStatus:
        return self.page


def session_of(status: WorkerStatus) -> WorkerSession:
    process: Any = Page(status)
    session = WorkerSession(process, 0.0, is_ready=True)
    session.last_progress_s(0.0)
    return session


def test_a_worker_that_neither_beats_nor_runs_a_step_is_silent_after_the_limit() -> None:
    session = session_of(WorkerStatus(3, ()))
    assert [session.is_silent(now_s, 5.0) for now_s in (4.9, 5.0)] == [False, True]


def test_a_counted_step_that_finishes_no_layer_is_silent_and_one_that_is_not_counted_tells_nothing() -> None:
    counted, uncounted = (StepInFlight(1, 256, 0.0, is_counted=one) for one in (True, False))
    assert session_of(WorkerStatus(3, ("a",), 0, counted)).is_silent(9.0, 5.0)
    assert not session_of(WorkerStatus(3, ("a",), 0, uncounted)).is_silent(9.0, 5.0)


def test_a_layer_that_is_done_is_progress() -> None:
    step = StepInFlight(1, 256, 0.5, is_counted=True)
    session = session_of(WorkerStatus(3, ("a",), 0, step))
    process: Any = session.process
    process.page = WorkerStatus(3, ("a",), 1, step)
    assert not session.is_silent(9.0, 5.0)


def test_a_worker_that_stands_still_is_not_ready_and_one_in_a_long_step_is() -> None:
    async def main() -> None:
        supervisor = made()
        supervisor.state = State.READY
        long_ago_s = -1e9
        for status, is_ready in (
            (WorkerStatus(3, ()), False),
            (WorkerStatus(3, ("a",), 0, StepInFlight(1, 256, 0.0)), True),
        ):
            session = session_of(status)
            session.progress_s = long_ago_s
            supervisor.session = session
            assert supervisor.is_ready is is_ready
            assert supervisor.step_s == 0.0, "a step is timed from when it is first seen"
        supervisor.session = None
        await supervisor.close()

    asyncio.run(main())
