"""Looking at a worker that may die: snapshots go on with the next one, questions end with the one they were asked."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from quire.client.engines.engine_view import MAX_QUERIES, EngineView
from quire.core.inspect.snapshots import BlockFacts, CellCounts, EngineSnapshot, PoolCells, TreePicture
from quire.engine.commands import GetBlock, StartSnapshots, StopSnapshots
from quire.errors import CapacityError, EngineDeadError, MessageError, QuireError
from quire.worker.messages import BlockInfo, SnapshotMade, ToWorker
from quire.worker.parent.worker_watch import MAX_WORKERS, WorkerWatch
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.served import served

SNAPSHOT = EngineSnapshot(PoolCells(1, 4, 1, b"\0", CellCounts(free=1)), TreePicture(), (), ())
FACTS = BlockFacts(7, "free", 0, 0, None, None, None, None, 0, (), (), ())


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
        watch.began()
        watch.ready()
        watch.take(SnapshotMade(SNAPSHOT))
        watch.ended("died")
    assert sent == [StartSnapshots(0.4)] * 3
    assert shown == [SNAPSHOT] * 3


def test_nobody_is_shown_what_comes_after_the_end_and_no_new_worker_is_asked() -> None:
    watch, sent = make()
    watch.began()
    watch.ready()
    shown: list[EngineSnapshot] = []
    watch.watch(shown.append, 0.4)
    watch.unwatch()
    watch.take(SnapshotMade(SNAPSHOT))
    watch.ended("died")
    watch.began()
    watch.ready()
    assert sent == [StartSnapshots(0.4), StopSnapshots()]
    assert shown == []


def test_a_question_is_answered_once_or_ends_with_its_worker() -> None:
    watch, sent = make()
    told: list[BlockFacts | QuireError | None] = []
    watch.request_block(7, told.append)
    assert isinstance(told.pop(), EngineDeadError)
    watch.began()
    watch.request_block(7, told.append)
    assert isinstance(told.pop(), EngineDeadError), "one that loads cannot be asked"
    watch.ready()
    for _ in range(3):
        watch.request_block(7, told.append)
    first, second, third = [one for one in sent if isinstance(one, GetBlock)]
    watch.take(BlockInfo(second.question_id, FACTS))
    watch.take(BlockInfo(first.question_id, None))
    assert told == [FACTS, None]
    with pytest.raises(MessageError, match="which is not pending"):
        watch.take(BlockInfo(first.question_id, FACTS))
    watch.ended("died")
    assert isinstance(told[2], EngineDeadError)
    with pytest.raises(MessageError, match="which is not pending"):
        watch.take(BlockInfo(third.question_id, FACTS))


def test_lives_are_remembered_up_to_a_bound() -> None:
    watch, _ = make()
    for number in range(MAX_WORKERS + 5):
        watch.began()
        watch.ready()
        watch.ended(f"why {number}")
    assert len(watch.workers) == MAX_WORKERS
    assert [one.number for one in watch.workers] == list(range(6, MAX_WORKERS + 6))
    last = watch.workers[-1]
    assert (last.state, last.why) == ("ended", f"why {MAX_WORKERS + 4}")
    assert last.ended_s is not None
    assert last.started_s <= last.ended_s


class NeverTold:
    """A port that answers no question."""

    workers = ()

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        raise NotImplementedError

    def unwatch(self) -> None:
        raise NotImplementedError

    def request_block(self, block_id: int, on_block: Callable[[BlockFacts | QuireError | None], None]) -> None:
        """Silence."""


def test_so_many_questions_may_wait_and_those_whose_askers_left_are_among_them() -> None:
    async def main() -> None:
        view = EngineView(NeverTold(), lambda call, *rest: call(*rest))
        asking = [asyncio.ensure_future(view.block(1)) for _ in range(MAX_QUERIES)]
        await asyncio.sleep(0)
        for one in asking[:3]:
            one.cancel()
        with pytest.raises(CapacityError, match=str(MAX_QUERIES)):
            await view.block(1)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(main())


def test_a_worker_that_is_killed_while_it_is_watched_is_followed_by_one_that_shows_itself() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), served() as model:
            shown: asyncio.Queue[EngineSnapshot] = asyncio.Queue()
            model.view.watch(shown.put_nowait, 0.05)
            assert (await shown.get()).pool.num_blocks == model.text.info.num_blocks
            facts = await model.view.block(1)
            assert facts is not None
            assert facts.state == "free"
            assert await model.view.block(0) is None
            pid = model.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while len(model.view.workers) < 2 or model.view.workers[-1].state != "ready":
                await asyncio.sleep(0.01)
            while not shown.empty():
                shown.get_nowait()
            await shown.get()
            first, second = model.view.workers
            assert (first.number, first.state, second.number) == (1, "ended", 2)
            assert f"worker {pid} died" in str(first.why)
            assert first.ended_s is not None
            assert first.started_s < first.ended_s <= second.started_s
            await model.generate("hello")
            assert (await model.view.block(1)) is not None
            model.view.unwatch()
            await model.generate("hello")
            before = model.load.num_snapshots
            await model.generate("hello again")
            assert model.load.num_snapshots == before > 0

    asyncio.run(main())


def test_steps_told_by_one_worker_after_the_other_are_numbered_anew_and_told_in_order() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), served() as model:
            shown: list[EngineSnapshot] = []
            model.view.watch(shown.append, 0.02)
            await model.generate("hello")
            while not any(one.steps for one in shown):
                await asyncio.sleep(0.01)
            numbers = [step.step for one in shown for step in one.steps]
            assert all(before < after for before, after in pairwise(numbers))

    asyncio.run(main())
