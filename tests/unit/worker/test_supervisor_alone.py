"""The supervisor where no worker is there, or where it fails itself."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from quire.config import ModelSettings
from quire.core.events import RequestEvent
from quire.core.request import Continuation, Request
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine.calls import GetBlock
from quire.engine.engine import ModelIdentity, ModelInfo
from quire.errors import EngineDeadError
from quire.worker.child.shared_status import WorkerStatus
from quire.worker.messages import LoadProgress, Open, Ready
from quire.worker.parent.session import WorkerSession
from quire.worker.parent.supervisor import State, Supervisor
from quire.worker.parent.worker_plan import WorkerPlan
from tests.support.errors import raises_code

OPEN = Open("no model", ModelSettings(), QueueConfig(), bytes(32), None)
READY = Ready(ModelInfo(ModelIdentity("model", "layout"), 4, 8, 10, 64, "a line"))


class Session:
    """What a supervisor looks at of a worker that has said something."""

    class process:  # noqa: N801 - an attribute
        pid = 1

    is_ready = False


def made(**plan: Any) -> Supervisor:
    return Supervisor(WorkerPlan(OPEN, **plan), lambda _events: None, lambda _error: None)


def test_where_there_is_no_worker_nothing_is_sent_and_there_is_nothing_to_look_at() -> None:
    async def main() -> None:
        supervisor = made()
        supervisor.clear_cache()
        assert (supervisor.pid, supervisor.ledger.num_progress, supervisor.is_ready) == (None, 0, False)
        with raises_code(EngineDeadError, "engine_dead"):
            supervisor.worker_status()
        await supervisor.close()
        assert await supervisor.drain(1.0)
        assert supervisor.state is State.CLOSED

    asyncio.run(main())


def test_who_asks_about_the_cache_where_there_is_no_worker_is_told_so() -> None:
    async def main() -> None:
        replies: list[object] = []
        supervisor = made()
        supervisor.call(GetBlock(1), replies.append)
        (error,) = replies
        assert isinstance(error, EngineDeadError)
        assert "retry when one is" in str(error)
        await supervisor.close()

    asyncio.run(main())


def test_a_supervisor_that_fails_itself_tells_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        supervisor = Supervisor(WorkerPlan(OPEN), lambda _events: None, failures.append)

        async def broken() -> None:
            raise RuntimeError("out of order")

        monkeypatch.setattr(supervisor, "_run_worker", broken)
        with raises_code(EngineDeadError, "supervisor_failed"):
            await supervisor.start()
        await supervisor.close()
        assert supervisor.state is State.FAILED
        assert len(failures) == 1
        assert not await supervisor.drain(1.0)

    asyncio.run(main())


def test_a_request_that_was_begun_elsewhere_is_let_in_beside_those_of_its_tenant() -> None:
    async def main() -> None:
        told: list[RequestEvent] = []
        plan = WorkerPlan(Open("no model", ModelSettings(max_running=1), QueueConfig(2), bytes(32)))
        supervisor = Supervisor(plan, told.extend, lambda _error: None)
        asked = Request("r", (1,), ModelIdentity("model", "layout").namespace(4, "group"), 0.0)
        for at in range(4):
            supervisor.submit(replace(asked, request_id=f"r{at}"))
        assert [event.request_id for event in told] == ["r3"], "no more than it would ever take of one tenant"
        supervisor.submit(replace(asked, request_id="begun", continuations=(Continuation(0, (5,)),)))
        assert supervisor.num_open == 4
        await supervisor.close()

    asyncio.run(main())


def test_a_beat_is_timed_by_who_sees_it_move() -> None:
    class Process:
        num_heartbeats = 1

        def status(self) -> WorkerStatus:
            return WorkerStatus(self.num_heartbeats, ())

    process: Any = Process()
    session = WorkerSession(process, 5.0)
    assert [session.last_progress_s(now_s) for now_s in (10.0, 11.0)] == [10.0, 10.0]
    process.num_heartbeats = 7
    assert [session.last_progress_s(now_s) for now_s in (12.0, 13.0)] == [12.0, 12.0]


def test_progress_is_handed_on_and_a_worker_that_is_ready_while_draining_changes_nothing() -> None:
    async def main() -> None:
        seen: list[tuple[str, int, int]] = []
        supervisor = made(progress=lambda *given: seen.append(given))
        session: Any = Session()
        supervisor.handle(session, LoadProgress("loading weights", 1, 2))
        assert seen == [("loading weights", 1, 2)]
        assert await supervisor.drain(1.0)
        supervisor.handle(session, READY)
        assert supervisor.state is State.DRAINING
        assert session.is_ready
        await supervisor.close()

    asyncio.run(main())
