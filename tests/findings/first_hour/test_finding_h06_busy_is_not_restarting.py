"""First hour, 6: a healthy worker in a long step was called restarting, and /ready turned 503; then it was shot."""

import asyncio
from typing import Any

from quire.api.models.registry import ModelEntry, Models
from quire.config import ModelSettings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.worker.child.shared_status import SharedStatus, StepInFlight, WorkerStatus
from quire.worker.messages import Open
from quire.worker.parent.session import WorkerSession
from quire.worker.parent.supervisor import Supervisor
from quire.worker.parent.worker_plan import Limits, WorkerPlan
from tests.support.servers.served import served
from tests.unit.worker.test_supervisor import POISON_SEED, fault, params, run, until

LIMITS = Limits(stuck_s=600.0)


def test_a_worker_in_a_long_step_is_busy_and_ready() -> None:
    """It was `restarting` from 4.5 s on, with its first worker and no restart."""

    async def main() -> None:
        async with served(faults=fault("hold"), limits=LIMITS) as model:
            entry = ModelEntry("oracle", engine_client=model)
            states: list[str] = []
            asking = asyncio.create_task(model.generate("poison", params(POISON_SEED)))

            def look() -> bool:
                assert Models([entry]).is_ready
                states.append(entry.state)
                return states[-1] == "busy" and model.stats().step_s > 5.0

            await until(look)
            assert set(states) == {"ready", "busy"}
            assert model.supervisor.num_restarts == 0
            asking.cancel()

    run(main)


class Process:
    """A worker in one endless step, whose page says how far it is."""

    pid = 1

    def __init__(self) -> None:
        self.num_layers = 0
        self.is_counted = self.is_killed = False

    def status(self) -> WorkerStatus:
        return WorkerStatus(1, ("r",), self.num_layers, StepInFlight(1, 64, 0.5, self.is_counted))

    def kill(self) -> None:
        self.is_killed = True


def test_a_worker_whose_layers_stand_still_is_silent_and_one_whose_layers_nobody_counts_is_not() -> None:
    process: Any = Process()
    session = WorkerSession(process, 0.0, is_ready=True)
    assert not session.is_silent(1.0, 4.5)
    assert not session.is_silent(100.0, 4.5)
    process.is_counted = True
    assert session.is_silent(100.0, 4.5)
    process.num_layers = 1
    assert not session.is_silent(101.0, 4.5)
    assert session.is_silent(106.0, 4.5)


def looked_at(num_layers_a_second: int, num_s: int) -> bool:
    """Whether a worker was shot, of a step so long, under a limit of 30 s."""
    plan = WorkerPlan(Open("no model", ModelSettings(), QueueConfig(), bytes(32)), Limits(stuck_s=30.0))
    process: Any = Process()
    session = WorkerSession(process, 0.0, is_ready=True)

    async def main() -> None:
        supervisor = Supervisor(plan, lambda _events: None, lambda _error: None)
        supervisor._resumed_s = 0.0
        for now_s in range(1, num_s):
            process.num_layers += num_layers_a_second
            supervisor.check_progress(session, float(now_s))
        await supervisor.close()

    asyncio.run(main())
    return bool(process.is_killed)


def test_a_step_of_an_hour_whose_layers_are_done_one_by_one_is_no_stuck_one() -> None:
    assert not looked_at(1, 3600)


def test_a_step_without_progress_is_found_at_its_limit() -> None:
    assert looked_at(0, 33)
    assert not looked_at(0, 30)


def test_what_of_a_step_is_done_is_read_from_the_page_while_it_runs() -> None:
    status = SharedStatus.create(4)
    status.step_layers = 8
    status.begin_step(64)
    assert status.read().step == StepInFlight(1, 64, 0.0, is_counted=True)
    layers = status.layers.cast("Q")
    layers[0] += 6
    assert status.read().step == StepInFlight(1, 64, 0.75, is_counted=True)
    status.clear_in_flight()
    assert (status.read().step, status.read().num_layers) == (None, 6)
    status.begin_step(32)
    layers[0] += 2
    assert status.read().step == StepInFlight(2, 32, 0.25, is_counted=True)
    layers.release()
    del layers
    status.close()
