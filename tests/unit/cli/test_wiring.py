"""Models that load while the API is imported: who asks for one waits for it, who leaves does not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints import quiet
from quire.cli.serve.wiring import file_stamps, model_opener
from quire.client.engines import park_plan, served
from quire.client.engines.park_plan import ModelPlan, ParkPlan
from quire.config import OnDemandModel, load_settings
from quire.errors import CheckpointError, ConfigError
from tests.support.errors import raises_code

SETTINGS = load_settings({}, environ={})
FIRST: Any = "the first worker"
ONE, TWO = (OnDemandModel(name, name, is_kept=True) for name in ("one", "two"))
PARKED = OnDemandModel("parked", "parked", sampling={"temperature": 0.5}, max_sequence_tokens=64)


class Loading:
    """Models that are there when a test says so, and what became of them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_load = asyncio.Event()
        self.planned: dict[str, Any] = {}

    def plan_worker(self, name: str, settings: Any, _serving: Any, **more: Any) -> Callable[[], str]:
        self.planned[name] = (settings, more)
        return lambda: name

    def model(self, prepare: Callable[[], str], on_opening: Callable[[], None], first: object) -> Any:
        @asynccontextmanager
        async def one() -> AsyncIterator[str]:
            name = prepare()
            on_opening()
            self.told.append(f"begun {name}" + (f" by {first}" if first else ""))
            try:
                await self.may_load.wait()
                yield name
            finally:
                self.told.append(f"ended {name}")

        return one()


def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    """The same for whoever opens models now."""
    made = Loading()

    def plan_park(models: list[OnDemandModel], *_more: Any) -> ParkPlan:
        return ParkPlan(100, {one.name: ModelPlan(Path(one.name), 7) for one in models})

    monkeypatch.setattr(park_plan, "plan_park", plan_park)
    monkeypatch.setattr(served, "plan_worker", made.plan_worker)
    monkeypatch.setattr(served, "ServedModel", made.model)
    return made


def test_a_worker_is_on_its_way_before_anything_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = loading(monkeypatch)
        async with model_opener([PARKED, ONE, TWO], SETTINGS, FIRST) as wiring:
            assert made.told == ["begun one by the first worker"]
            made.may_load.set()
            async with wiring.open(ONE, quiet) as one, wiring.open(TWO, quiet) as two:
                assert [str(one), str(two)] == ["one", "two"]
            assert made.told == ["begun one by the first worker", "begun two", "ended two", "ended one"]
            async with wiring.open(ONE, quiet) as one:
                assert made.told[-1] == "begun one"
        assert made.told[-1] == "ended one"

    asyncio.run(go())


def test_a_model_is_opened_with_its_own_memory_context_and_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = loading(monkeypatch)
        made.may_load.set()
        async with model_opener([ONE, PARKED], SETTINGS, FIRST) as wiring:
            sizes = await wiring.weigh()
            assert (sizes.memory_bytes, dict(sizes.needed_bytes), dict(sizes.problems)) == (
                100,
                {"one": 7, "parked": 7},
                {},
            )
            async with wiring.open(PARKED, quiet):
                settings, more = made.planned["parked"]
                assert (settings.memory_bytes, settings.max_sequence_tokens) == (7, 64)
                assert more["options"] == served.ModelOptions(1, {"temperature": 0.5}, runs_at_low_priority=True)
                told: list[tuple[str, int, int]] = []
            async with wiring.open(PARKED, lambda *one: told.append(one)):
                made.planned["parked"][1]["progress"]("loading", 1, 2)
                assert told == [("loading", 1, 2)]

    asyncio.run(go())


def test_who_leaves_while_a_model_loads_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = loading(monkeypatch)
        with pytest.raises(ConfigError):
            async with model_opener([ONE], SETTINGS, FIRST):
                raise ConfigError("no keys")
        assert made.told == ["begun one by the first worker", "ended one"]

    asyncio.run(go())


def test_a_model_that_is_not_there_is_told_to_who_asks_for_it(tmp_path: Path) -> None:
    gone = OnDemandModel("gone", str(tmp_path / "none.gguf"), is_kept=True)

    async def go() -> None:
        async with model_opener([gone], SETTINGS, FIRST) as wiring:
            with raises_code(CheckpointError, "file_not_readable"):
                async with wiring.open(gone, quiet):
                    pass

    asyncio.run(go())


def test_what_went_wrong_with_the_server_is_told_before_what_went_wrong_with_a_model(tmp_path: Path) -> None:
    gone = OnDemandModel("gone", str(tmp_path / "none.gguf"), is_kept=True)

    async def go() -> None:
        with pytest.raises(ConfigError):
            async with model_opener([gone], SETTINGS, FIRST):
                raise ConfigError("no keys")

    asyncio.run(go())


def test_a_model_that_comes_back_is_read_again_only_if_its_files_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "parked.gguf"
    file.write_bytes(b"one")

    async def go() -> None:
        made = loading(monkeypatch)
        made.may_load.set()
        num_read = 0

        def plan_worker(*_given: Any, **_more: Any) -> Callable[[], str]:
            def prepare() -> str:
                nonlocal num_read
                num_read += 1
                return "parked"

            return prepare

        monkeypatch.setattr(served, "plan_worker", plan_worker)
        monkeypatch.setattr(
            park_plan, "plan_park", lambda models, *_more: ParkPlan(9, {one.name: ModelPlan(file, 7) for one in models})
        )
        async with model_opener([PARKED], SETTINGS, FIRST) as wiring:
            for written, wanted in ((b"one", 1), (b"one", 1), (b"other", 2)):
                if file.read_bytes() != written:
                    file.write_bytes(written)
                async with wiring.open(PARKED, quiet):
                    assert num_read == wanted

    asyncio.run(go())


def test_files_of_a_directory_and_of_a_model_that_is_gone_have_their_stamps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert [(name, size) for name, size, _ in file_stamps(tmp_path)] == [("config.json", 2)]
    assert file_stamps(tmp_path / "gone") == file_stamps(None) == frozenset()
