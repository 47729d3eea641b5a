"""An asyncio client of an engine in this process. One thread runs the engine's steps for all requests.

async with AsyncEngine("model") as engine:
    async for piece in engine.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
from types import TracebackType

from quire.client.engines.client import EngineClient
from quire.client.engines.opening import OpenedModel, open_model
from quire.config import ModelSettings
from quire.engine.loop import EngineThread
from quire.errors import EngineDeadError


class AsyncEngine(EngineClient):
    """A model in this process, used by any number of tasks on one event loop."""

    def __init__(self, model: str | OpenedModel, settings: ModelSettings | None = None) -> None:
        super().__init__()
        self._model = model
        self._settings = settings
        self._thread: EngineThread | None = None

    async def __aenter__(self) -> "AsyncEngine":
        self._loop = asyncio.get_running_loop()
        opened = self._model
        if isinstance(opened, str):
            opened = await asyncio.to_thread(open_model, opened, self._settings)
        self._thread = EngineThread(opened.engine, self._on_events, self._on_failure)
        self._port, self._text = self._thread, opened.text
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._text is not None:
                self._text.close()
            if self._thread is not None:
                await asyncio.shield(asyncio.to_thread(self._thread.close))
        finally:
            self._end_all(EngineDeadError("the engine was closed while requests were running"))
