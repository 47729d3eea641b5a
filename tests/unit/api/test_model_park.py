"""Models that come and go on an event loop: who waits is served, who uses a model keeps it, nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api.http.errors import ApiError
from quire.api.models import model_park, park_moves
from quire.api.models.model_park import ModelManager, OnDemandLimits, ReportProgress, Sizes
from quire.api.models.park_moves import Stage
from quire.api.models.registry import ModelEntry
from quire.config import OnDemandModel
from quire.errors import CheckpointError, EngineDeadError

LIMITS = OnDemandLimits(max_waiting=3, turn_s=0.0)


class Front:
    """A model that is loaded, as far as a park looks at one."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = self.is_ready = True
        self.text = SimpleNamespace(info=SimpleNamespace(line=f"{name} is here"))

    async def suspend(self) -> None:
        self.world.told.append(f"-({self.name})")

    async def resume(self) -> None:
        if self.name in self.world.failing:
            raise self.world.failing[self.name]
        self.world.told.append(f"+({self.name})")


class World:
    """Models that load when a test says so, and what became of them."""

    def __init__(self, *models: OnDemandModel, room: int = 2, limits: OnDemandLimits = LIMITS) -> None:
        self.entries = {one.name: ModelEntry(one.name, is_required=one.is_kept) for one in models}
        self.told: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.failing: dict[str, Exception] = {}
        self.fronts: dict[str, Front] = {}
        self.problems: dict[str, str] = {}
        self.room = room
        pairs = [(one, self.entries[one.name]) for one in models]
        self.park = ModelManager(pairs, self.opening, self.weigh, limits)

    async def weigh(self) -> Sizes:
        return Sizes(self.room, dict.fromkeys(self.entries, 1), self.problems)

    @asynccontextmanager
    async def opening(self, model: OnDemandModel, tell: ReportProgress) -> AsyncIterator[Any]:
        tell("loading weights", 1, 2)
        await self.may_load.wait()
        if model.name in self.failing:
            raise self.failing[model.name]
        self.told.append(f"+{model.name}")
        self.fronts[model.name] = Front(self, model.name)
        try:
            yield self.fronts[model.name]
        finally:
            self.told.append(f"-{model.name}")

    async def ask(self, name: str, tenant: str = "t") -> str:
        async with self.park.using(self.entries[name], tenant) as client:
            found: Any = client
            return str(found.name)

    def hold(self, name: str, tenant: str = "t") -> "Held":
        return Held(self, name, tenant)

    def stages(self) -> dict[str, str]:
        return {name: entry.stage.value for name, entry in self.entries.items()}


class Held:
    """A request that takes as long as a test wants."""

    def __init__(self, world: World, name: str, tenant: str) -> None:
        self._end = asyncio.Event()
        self.is_begun = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(world, name, tenant))

    async def _run(self, world: World, name: str, tenant: str) -> None:
        async with world.park.using(world.entries[name], tenant):
            self.is_begun.set()
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def on_demand(*names: str) -> list[OnDemandModel]:
    return [OnDemandModel(name, name) for name in names]


def test_models_that_are_kept_are_there_at_the_start_and_others_when_they_are_asked_for() -> None:
    async def main() -> None:
        world = World(OnDemandModel("k", "k", is_kept=True), *on_demand("a", "b"))
        assert not world.park.is_ready
        await world.park.start()
        assert world.park.is_ready
        assert world.stages() == {"k": "ready", "a": "unloaded", "b": "unloaded"}
        assert await world.ask("a") == "a"
        assert await world.ask("b") == "b"
        await settled(lambda: world.told == ["+k", "+a", "-a", "+b"])
        await world.park.close()
        assert sorted(world.told[-2:]) == ["-b", "-k"]
        assert set(world.stages().values()) == {"unloaded"}

    play(main)


def test_a_model_that_answers_is_not_unloaded_and_takes_nobody_new_while_another_waits() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1)
        await world.park.start()
        first = world.hold("a")
        await first.is_begun.wait()
        other = world.hold("b", "v")
        await settled(lambda: world.entries["a"].stage is Stage.UNLOADING)
        again = world.hold("a")
        await asyncio.sleep(0.01)
        assert world.told == ["+a"]
        assert not again.is_begun.is_set()
        await first.end()
        await other.is_begun.wait()
        assert world.told == ["+a", "-a", "+b"]
        await other.end()
        await again.is_begun.wait()
        await again.end()
        await world.park.close()
        assert world.told == ["+a", "-a", "+b", "-b", "+a", "-a"]

    play(main)


def test_a_tenants_own_answers_do_not_hold_a_model_against_its_wish_and_go_on_when_it_is_back() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1)
        await world.park.start()
        long = world.hold("a")
        await long.is_begun.wait()
        short = world.hold("b")
        await short.is_begun.wait()
        assert world.told == ["+a", "-(a)", "+b"]
        assert world.stages() == {"a": "unloaded", "b": "unloading"}
        await short.end()
        await settled(lambda: world.stages()["a"] == "ready")
        assert world.told == ["+a", "-(a)", "+b", "-b", "+(a)"]
        await long.end()
        await world.park.close()
        assert world.told[-1] == "-a"

    play(main)


def test_the_last_answers_of_others_are_set_aside_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(park_moves, "MAX_UNLOAD_DELAY_S", 0.02)
        world = World(*on_demand("a", "b"), room=1)
        await world.park.start()
        holding = [world.hold("a", tenant) for tenant in "uv"]
        await asyncio.gather(*(one.is_begun.wait() for one in holding))
        assert await world.ask("b") == "b"
        await settled(lambda: world.stages()["a"] == "ready")
        assert world.told == ["+a", "-(a)", "+b", "-b", "+(a)"]
        for one in holding:
            await one.end()
        await world.park.close()

    play(main)


def test_a_model_whose_last_answer_has_gone_while_it_was_set_aside_is_closed_and_can_come_back() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1)
        await world.park.start()
        long, short = world.hold("a"), world.hold("b", "t")
        await short.is_begun.wait()
        long.task.cancel()
        await asyncio.gather(long.task, return_exceptions=True)
        again = asyncio.ensure_future(world.ask("a"))
        await short.end()
        assert await again == "a"
        assert world.told == ["+a", "-(a)", "+b", "-a", "-b", "+a"]
        assert world.park.slots["a"].users.total() == 0
        await world.park.close()

    play(main)


def test_answers_that_were_set_aside_end_when_the_server_does_or_their_model_cannot_come_back() -> None:
    async def main() -> None:
        for is_failing in (False, True):
            world = World(*on_demand("a", "b"), room=1)
            await world.park.start()
            long, short = world.hold("a"), world.hold("b")
            await short.is_begun.wait()
            if is_failing:
                world.failing["a"] = CheckpointError("it is damaged")
                await short.end()
            else:
                world.park.drain()
            await settled(lambda: "-a" in world.told)  # noqa: B023
            assert world.stages()["a"] == "unloaded"
            if not is_failing:
                await short.end()
            await long.end()
            await settled(lambda: not world.park.slots["a"].users)  # noqa: B023
            await world.park.close()

    play(main)


def test_a_tenant_that_has_many_models_loaded_is_told_to_come_back_and_others_are_not() -> None:
    async def main() -> None:
        names = "abcdef"
        world = World(*on_demand(*names), room=6)
        world.may_load.clear()
        await world.park.start()
        asked = [asyncio.ensure_future(world.ask(name)) for name in "abcda"]
        await settled(lambda: world.entries["d"].stage is Stage.LOADING)
        with pytest.raises(ApiError) as refused:
            await world.ask("e")
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert 50 < (refused.value.retry_after_s or 0) <= 60
        asked.append(asyncio.ensure_future(world.ask("e", "v")))
        by_hand = asyncio.ensure_future(world.park.load(world.entries["f"]))
        world.may_load.set()
        await asyncio.gather(*asked, by_hand)
        assert await world.ask("e") == "e"  # it is here: nothing is to be loaded
        await world.park.close()

    play(main)


def test_who_no_longer_waits_makes_nobody_leave() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1)
        await world.park.start()
        first = world.hold("a")
        await first.is_begun.wait()
        other = world.hold("b", "v")
        await settled(lambda: world.entries["a"].stage is Stage.UNLOADING)
        second = world.hold("a")
        await asyncio.sleep(0)
        other.task.cancel()
        await second.is_begun.wait()
        assert world.told == ["+a"]
        await first.end()
        await second.end()
        await world.park.close()

    play(main)


def test_who_is_broken_off_at_the_moment_it_is_let_in_gives_its_place_back() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1)
        world.may_load.clear()
        await world.park.start()
        asked = world.hold("a")
        await settled(lambda: world.entries["a"].stage is Stage.LOADING)
        resident = world.park.slots["a"]
        world.may_load.set()
        await settled(lambda: resident.users.total() == 1)
        if not asked.is_begun.is_set():
            asked.task.cancel()
            await asyncio.gather(asked.task, return_exceptions=True)
        else:  # pragma: no cover
            await asked.end()
        assert resident.users.total() == 0
        assert await world.ask("b") == "b"
        await world.park.close()

    play(main)


def test_who_was_broken_off_in_the_very_moment_a_model_comes_or_fails_does_no_harm() -> None:
    async def main() -> None:
        for is_failing in (False, True):
            world = World(*on_demand("a"))
            world.may_load.clear()
            await world.park.start()
            leaving, staying = world.hold("a"), asyncio.ensure_future(world.ask("a"))
            await settled(lambda: world.park.slots["a"].num_waiting == 2)  # noqa: B023
            resident = world.park.slots["a"]
            leaving.task.cancel()  # its task hears of it in the next round of the loop
            if is_failing:
                resident.refuse(CheckpointError("it is damaged"))
                with pytest.raises(ApiError) as refused:
                    await staying
                assert refused.value.code == "model_not_loaded"
            else:
                resident.entry.engine_client = Front(world, "a")  # type: ignore[assignment]
                resident.begin_turn(0.0)
                assert await staying == "a"
            await asyncio.gather(leaving.task, return_exceptions=True)
            assert (resident.users.total(), resident.num_waiting) == (0, 0)
            world.may_load.set()
            await world.park.close()

    play(main)


def test_many_may_wait_and_one_more_is_told_to_come_back() -> None:
    async def main() -> None:
        world = World(*on_demand("a"))
        world.may_load.clear()
        await world.park.start()
        asked = [asyncio.ensure_future(world.ask("a")) for _ in range(3)]
        await settled(lambda: world.entries["a"].stage is Stage.LOADING)
        await settled(lambda: world.entries["a"].loaded_share == 0.5)
        with pytest.raises(ApiError) as refused:
            await world.ask("a")
        assert (refused.value.status, refused.value.code) == (503, "model_loading")
        assert refused.value.retry_after_s is not None
        world.may_load.set()
        assert await asyncio.gather(*asked) == ["a"] * 3
        await world.park.close()

    play(main)


def test_a_model_that_cannot_be_loaded_is_told_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World(*on_demand("a"))
        await world.park.start()
        world.failing["a"] = CheckpointError("it is damaged")
        for _ in range(2):
            with pytest.raises(ApiError) as refused:
                await world.ask("a")
            assert (refused.value.status, refused.value.code) == (503, "model_not_loaded")
        assert world.stages() == {"a": "unloaded"}
        world.failing.clear()
        monkeypatch.setattr(model_park, "FAILED_RETRY_S", 0.0)
        assert await world.ask("a") == "a"
        world.failing["a"] = RuntimeError("a mistake of ours")
        world.park.unload(world.entries["a"])
        with pytest.raises(RuntimeError):
            await world.ask("a")
        await world.park.close()

    play(main)


def test_a_kept_model_that_cannot_be_loaded_ends_the_start() -> None:
    async def main() -> None:
        world = World(OnDemandModel("k", "k", is_kept=True))
        world.failing["k"] = CheckpointError("it is damaged")
        with pytest.raises(CheckpointError):
            await world.park.start()
        await world.park.close()

    play(main)


def test_what_can_never_be_loaded_is_refused_with_what_would_have_to_go() -> None:
    async def main() -> None:
        world = World(OnDemandModel("k", "k", is_kept=True), *on_demand("a"), room=1)
        world.problems["a"] = ""
        await world.park.start()
        with pytest.raises(ApiError) as refused:
            await world.ask("a")
        assert (refused.value.status, refused.value.code) == (400, "model_does_not_fit")
        await world.park.close()
        huge = World(*on_demand("a"), room=0)
        await huge.park.start()
        with pytest.raises(ApiError) as refused:
            await huge.ask("a")
        assert refused.value.code == "model_does_not_fit"
        await huge.park.close()

    play(main)


def test_a_model_that_is_not_on_this_machine_is_refused_with_what_to_do() -> None:
    async def main() -> None:
        world = World(*on_demand("a"))
        world.problems["a"] = "the model a is not on this machine; fetch it with: quire pull org/a"
        await world.park.start()
        with pytest.raises(ApiError) as refused:
            await world.ask("a")
        assert refused.value.code == "model_not_here"
        await world.park.close()

    play(main)


def test_an_operator_loads_and_unloads_whatever_is_not_kept() -> None:
    async def main() -> None:
        world = World(OnDemandModel("k", "k", is_kept=True), *on_demand("a"))
        await world.park.start()
        await world.park.load(world.entries["a"])
        held = world.hold("a")
        await held.is_begun.wait()
        world.park.unload(world.entries["a"])
        world.park.apply_moves()
        assert world.stages()["a"] == "unloading"
        await held.end()
        await settled(lambda: world.stages()["a"] == "unloaded")
        world.park.unload(world.entries["a"])  # it is away: nothing is to be done
        with pytest.raises(ApiError) as refused:
            world.park.unload(world.entries["k"])
        assert (refused.value.status, refused.value.code) == (400, "invalid_request")
        world.may_load.clear()
        coming = asyncio.ensure_future(world.park.load(world.entries["a"]))
        await settled(lambda: world.stages()["a"] == "loading")
        with pytest.raises(ApiError) as refused:
            world.park.unload(world.entries["a"])
        assert (refused.value.status, refused.value.code) == (409, "model_loading")
        world.may_load.set()
        await coming
        await world.park.close()

    play(main)


def test_a_model_nobody_uses_leaves_after_its_time_by_itself() -> None:
    async def main() -> None:
        world = World(OnDemandModel("a", "a", idle_s=0.01), limits=OnDemandLimits(idle_s=3600.0))
        await world.park.start()
        await world.ask("a")
        await settled(lambda: world.told == ["+a", "-a"])
        await world.park.close()

    play(main)


def test_a_model_serves_until_its_turn_ends_and_then_makes_room() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b"), room=1, limits=OnDemandLimits(turn_s=0.02))
        await world.park.start()
        await world.ask("a")
        other = asyncio.ensure_future(world.ask("b", "v"))
        assert await world.ask("a", "u") == "a"  # others are served until the turn ends
        assert await other == "b"
        assert world.told == ["+a", "-a", "+b"]
        await world.park.close()

    play(main)


def test_a_model_whose_engine_has_died_for_good_is_loaded_anew() -> None:
    async def main() -> None:
        world = World(OnDemandModel("k", "k", is_kept=True), *on_demand("a"))
        await world.park.start()
        await world.ask("a")
        world.fronts["a"].is_alive = world.fronts["k"].is_alive = False
        assert world.entries["a"].state == "failed"
        assert await world.ask("a") == "a"
        assert world.told == ["+k", "+a", "-a", "+a"]
        with pytest.raises(EngineDeadError):
            await world.ask("k")
        await world.park.close()

    play(main)


def test_a_server_that_ends_while_it_loads_does_not_wait_for_the_model() -> None:
    async def main() -> None:
        world = World(*on_demand("a"))
        world.may_load.clear()
        await world.park.start()
        asked = asyncio.ensure_future(world.ask("a"))
        await settled(lambda: world.entries["a"].stage is Stage.LOADING)
        await world.park.close()
        assert world.told == []
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    play(main)


def test_many_who_ask_three_models_in_the_room_of_two_are_all_answered() -> None:
    async def main() -> None:
        world = World(*on_demand("a", "b", "c"), limits=OnDemandLimits(max_waiting=100, turn_s=0.0))
        await world.park.start()
        answers: list[Awaitable[str]] = [world.ask("abc"[number % 3], "abc"[number % 3]) for number in range(60)]
        assert sorted(await asyncio.gather(*answers)) == ["a"] * 20 + ["b"] * 20 + ["c"] * 20
        held = [resident.users.total() for resident in world.park.slots.values()]
        assert held == [0, 0, 0]
        await world.park.close()

    play(main)
