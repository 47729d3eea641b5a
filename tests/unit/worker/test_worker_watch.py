"""Looking at a worker that may die: snapshots go on with the next one."""

import asyncio
import os
import signal
from collections.abc import Sequence
from itertools import pairwise

from quire.core.inspect.snapshots import CellCounts, EngineSnapshot, PoolCells, TreePicture
from quire.engine.commands import StartSnapshots, StopSnapshots
from quire.worker.messages import ToWorker
from quire.worker.parent.worker_watch import MAX_WORKER_RECORDS, WorkerWatch
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served

SNAPSHOT = EngineSnapshot(PoolCells(1, 4, 1, b"\0", CellCounts(free=1)), TreePicture(), (), ())


def make() -> tuple[WorkerWatch, list[ToWorker]]:
    sent: list[ToWorker] = []

    def send(commands: Sequence[ToWorker]) -> None:
        if watch.workers and watch.workers[-1].state == "ready":
            sent.extend(commands)

    watch = WorkerWatch(send)
    return watch, sent


def test_who_watches_goes_on_watching_whatever_worker_comes() -> None:
    watch, sent = make()
    shown: list[EngineSnapshot] = []
    watch.watch(shown.append, 0.4)
    for _ in range(3):
        watch.add_worker()
        watch.mark_ready()
        watch.show(SNAPSHOT)
        watch.mark_ended("died")
    assert sent == [StartSnapshots(0.4)] * 3
    assert shown == [SNAPSHOT] * 3


def test_nobody_is_shown_what_comes_after_the_end_and_no_new_worker_is_asked() -> None:
    watch, sent = make()
    watch.add_worker()
    watch.mark_ready()
    shown: list[EngineSnapshot] = []
    watch.watch(shown.append, 0.4)
    watch.unwatch()
    watch.show(SNAPSHOT)
    watch.mark_ended("died")
    watch.add_worker()
    watch.mark_ready()
    assert sent == [StartSnapshots(0.4), StopSnapshots()]
    assert shown == []


def test_lives_are_remembered_up_to_a_bound() -> None:
    watch, _ = make()
    for number in range(MAX_WORKER_RECORDS + 5):
        watch.add_worker()
        watch.mark_ready()
        watch.mark_ended(f"why {number}")
    assert len(watch.workers) == MAX_WORKER_RECORDS
    assert [one.number for one in watch.workers] == list(range(6, MAX_WORKER_RECORDS + 6))
    last = watch.workers[-1]
    assert (last.state, last.why) == ("ended", f"why {MAX_WORKER_RECORDS + 4}")
    assert last.ended_s is not None
    assert last.started_s <= last.ended_s


def test_a_worker_that_is_killed_while_it_is_watched_is_followed_by_one_that_shows_itself() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), served() as model:
            shown: asyncio.Queue[EngineSnapshot] = asyncio.Queue()
            model.watch(shown.put_nowait, 0.05)
            assert (await shown.get()).pool.num_blocks == model.text.info.num_blocks
            facts = await model.block(1)
            assert facts is not None
            assert facts.state == "free"
            assert await model.block(0) is None
            pid = model.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while len(model.workers) < 2 or model.workers[-1].state != "ready":
                await asyncio.sleep(0.01)
            while not shown.empty():
                shown.get_nowait()
            await shown.get()
            first, second = model.workers
            assert (first.number, first.state, second.number) == (1, "ended", 2)
            assert f"worker {pid} died" in str(first.why)
            assert first.ended_s is not None
            assert first.started_s < first.ended_s <= second.started_s
            await model.generate("hello")
            assert (await model.block(1)) is not None
            model.unwatch()
            await model.generate("hello")
            before = model.supervisor.load.num_snapshots
            await model.generate("hello again")
            assert model.supervisor.load.num_snapshots == before > 0

    asyncio.run(main())


def test_steps_told_by_one_worker_after_the_other_are_numbered_anew_and_told_in_order() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), served() as model:
            shown: list[EngineSnapshot] = []
            model.watch(shown.append, 0.02)
            await model.generate("hello")
            while not any(one.steps for one in shown):
                await asyncio.sleep(0.01)
            numbers = [step.step for one in shown for step in one.steps]
            assert all(before < after for before, after in pairwise(numbers))

    asyncio.run(main())
