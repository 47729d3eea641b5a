"""Threads for text: one of them for one tenant at most, turns between tenants, whoever leaves is gone."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from quire.client.request.text_pool import TextPool
from quire.errors import QueueFullError
from tests.support.machine.patience import PATIENCE_S


class Held:
    """Work that goes on when it is let go, and says who did what in which order."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            self.go_on.wait(30)
            return name

        return run


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.001)


def test_what_the_work_returns_or_raises_comes_back() -> None:
    async def live() -> str:
        pool = TextPool()
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0)
        return await pool.run("a", lambda: threading.current_thread().name)

    assert asyncio.run(live()).startswith("quire-text")


def test_one_tenant_has_one_thread_and_waiting_tenants_take_turns() -> None:
    async def live() -> list[str]:
        pool, held = TextPool(), Held()
        tasks = [asyncio.ensure_future(pool.run("greedy", held.work(f"greedy {at}"))) for at in range(4)]
        await until(lambda: len(held.begun) == 1)
        assert await pool.run("other", lambda: "at once") == "at once"
        tasks += [asyncio.ensure_future(pool.run(name, held.work(name))) for name in ("b", "c")]
        await until(lambda: len(held.begun) == 2)
        assert pool.num_waiting == 4
        held.go_on.set()
        await asyncio.gather(*tasks)
        return held.begun

    begun = asyncio.run(live())
    assert begun[:2] == ["greedy 0", "b"]
    assert begun.index("c") <= 3, "before the third text of the one that sent most"


def test_whoever_leaves_while_waiting_is_gone_and_what_has_begun_keeps_its_turn() -> None:
    async def live() -> None:
        pool, held = TextPool(), Held()
        first, second = (asyncio.ensure_future(pool.run("a", held.work(name))) for name in ("first", "second"))
        await until(lambda: held.begun == ["first"])
        for task in (second, first):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert pool.num_waiting == 0
        third = asyncio.ensure_future(pool.run("a", lambda: "third"))
        await asyncio.sleep(0)
        assert pool.num_waiting == 1, "leaving early does not get anybody a second thread"
        held.go_on.set()
        assert await third == "third"
        assert held.begun == ["first"]

    asyncio.run(live())


def test_more_than_may_wait_are_told_to_come_back() -> None:
    async def live() -> None:
        pool, held = TextPool(num_threads=1, max_waiting=2), Held()
        tasks = [asyncio.ensure_future(pool.run("a", held.work(str(at)))) for at in range(3)]
        await until(lambda: len(held.begun) == 1)
        with pytest.raises(QueueFullError):
            await pool.run("b", lambda: None)
        held.go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(live())


def test_a_pause_ends_with_what_the_tenant_has_in_a_thread_and_nobody_else_waits() -> None:
    async def live() -> None:
        pool, held = TextPool(), Held()
        working = asyncio.ensure_future(pool.run("a", held.work("a")))
        await until(lambda: held.begun == ["a"])
        await pool.pause("b")
        pausing = [asyncio.ensure_future(pool.pause("a")) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(one.done() for one in pausing)
        pausing.pop().cancel()
        held.go_on.set()
        await asyncio.gather(working, *pausing)
        await pool.pause("a")

    asyncio.run(live())
