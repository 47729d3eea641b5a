"""Models that load while the API is imported: who asks for one waits for it, who leaves does not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints import quiet
from quire.cli.wiring import supervised
from quire.client import served
from quire.config import load_settings
from quire.errors import CheckpointError, ConfigError

SETTINGS = load_settings({}, environ={})
FIRST: Any = "the first worker"


class Loading:
    """Models that are there when a test says so, and what became of them."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may_load = asyncio.Event()

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
    monkeypatch.setattr(served, "plan_workers", lambda names, *_settings, **_more: list(names))
    monkeypatch.setattr(served, "ServedModel", made.model)
    return made


def test_a_worker_is_on_its_way_before_anything_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = loading(monkeypatch)
        async with supervised(["one", "two"], SETTINGS, quiet, FIRST) as opening:
            assert made.told == ["begun one by the first worker"]
            made.may_load.set()
            async with opening("two", SETTINGS) as model:
                assert str(model) == "two"
            assert made.told == ["begun one by the first worker", "begun two"]
        assert made.told == ["begun one by the first worker", "begun two", "ended two", "ended one"]

    asyncio.run(go())


def test_who_leaves_while_a_model_loads_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = loading(monkeypatch)
        with pytest.raises(ConfigError, match="no keys"):
            async with supervised(["one"], SETTINGS, quiet, FIRST):
                raise ConfigError("no keys")
        assert made.told == ["begun one by the first worker", "ended one"]

    asyncio.run(go())


def test_a_model_that_is_not_there_is_told_to_who_asks_for_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with supervised([str(tmp_path / "none.gguf")], SETTINGS, quiet, FIRST) as opening:
            with pytest.raises(CheckpointError, match="cannot be opened"):
                async with opening(str(tmp_path / "none.gguf"), SETTINGS):
                    pass

    asyncio.run(go())


def test_what_went_wrong_with_the_server_is_told_before_what_went_wrong_with_a_model(tmp_path: Path) -> None:
    async def go() -> None:
        with pytest.raises(ConfigError, match="no keys"):
            async with supervised([str(tmp_path / "none.gguf")], SETTINGS, quiet, FIRST):
                raise ConfigError("no keys")

    asyncio.run(go())
