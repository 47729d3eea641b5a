"""The supervisor where no worker is there, or where it fails itself."""

import asyncio
from typing import Any

import pytest

from quire.config import ModelSettings
from quire.core.events import Explained, Queued, RequestEvent
from quire.core.prefix_tree import Divergence, MissReason
from quire.core.waiting_queue import QueueConfig
from quire.engine.engine import ModelIdentity, ModelInfo
from quire.errors import EngineDeadError, MessageError
from quire.worker.cache_questions import CacheQuestions
from quire.worker.messages import LoadProgress, Open, Ready
from quire.worker.supervisor import State, Supervisor
from quire.worker.worker_plan import WorkerPlan

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
        assert (supervisor.pid, supervisor.num_progress, supervisor.is_ready) == (None, 0, False)
        with pytest.raises(EngineDeadError, match="no worker at this moment"):
            supervisor.flight()
        await supervisor.close()
        assert await supervisor.drain(1.0)
        assert supervisor.state is State.CLOSED

    asyncio.run(main())


def test_a_supervisor_that_fails_itself_tells_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        supervisor = Supervisor(WorkerPlan(OPEN), lambda _events: None, failures.append)

        async def broken() -> None:
            raise RuntimeError("out of order")

        monkeypatch.setattr(supervisor, "_live_once", broken)
        with pytest.raises(EngineDeadError, match="the supervisor failed: RuntimeError"):
            await supervisor.start()
        await supervisor.close()
        assert supervisor.state is State.DEAD
        assert len(failures) == 1
        assert not await supervisor.drain(1.0)

    asyncio.run(main())


def test_progress_is_handed_on_and_a_worker_that_is_ready_while_draining_changes_nothing() -> None:
    async def main() -> None:
        seen: list[tuple[str, int, int]] = []
        supervisor = made(progress=lambda *given: seen.append(given))
        session: Any = Session()
        supervisor._hear(session, LoadProgress("loading weights", 1, 2))
        assert seen == [("loading weights", 1, 2)]
        assert await supervisor.drain(1.0)
        supervisor._hear(session, READY)
        assert supervisor.state is State.DRAINING
        assert session.is_ready
        await supervisor.close()

    asyncio.run(main())


def test_an_answer_to_a_question_that_was_not_asked_is_an_error() -> None:
    questions, answer = CacheQuestions(), Explained("q1", Divergence(0, MissReason.DIVERGED))
    questions.add("q1")
    told: list[RequestEvent] = []
    assert questions.take([Queued("r1"), answer], told) == [Queued("r1")]
    assert told == [answer]
    assert not questions.open
    with pytest.raises(MessageError, match="nobody asked"):
        questions.take([answer], told)
