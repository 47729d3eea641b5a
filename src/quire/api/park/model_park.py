"""Models that come and go: does what `park_moves.py` decides, and lets requests wait for the model they ask.

    using(model) ──► here: at once                  a request holds its model until its last byte
                └──► away, loading, leaving: waits ──► using

On one event loop. Each model that is here has a task of its own, from its loading to its end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from quire.api.http.errors import ApiError, invalid
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.models import ModelEntry
from quire.api.park.park_moves import Moves, Parked, Stage, in_its_way, next_moves
from quire.client.client import EngineClient
from quire.config.parked_models import ParkedModel
from quire.errors import CheckpointError, ConfigError, DrainingError, QuireError

log = logging.getLogger("quire.park")
GIB = 1 << 30
FAILED_RETRY_S = 10.0
"""A model that could not be loaded is not tried again before."""

TellProgress = Callable[[str, int, int], None]
"""Hears what is being done, how far it is, and how far it goes."""
OpenClient = Callable[[ParkedModel, TellProgress], AbstractAsyncContextManager[EngineClient]]
"""A front and what is behind it, for as long as it is needed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What there is, and what each model takes of it."""

    memory_bytes: int = 0
    needed_bytes: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a model cannot be loaded, by name."""


Weigh = Callable[[], Awaitable[Sizes]]
"""Finds out, once: files are looked at, and models that are kept are fetched."""


async def weightless() -> Sizes:
    """Models that fit whatever there is."""
    return Sizes()


@dataclass(frozen=True, slots=True)
class ParkLimits:
    """What an operator decides about coming and going."""

    max_waiting: int = 2048
    """Requests that may wait for one model to be loaded."""
    idle_s: float | None = None
    """For models that say nothing."""
    min_stay_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Resident:
    """One model, here or away."""

    model: ParkedModel
    entry: ModelEntry
    num_users: int = 0
    waiting: dict[asyncio.Future[None], float] = field(default_factory=dict)
    """Who waits, and since when."""
    here_since_s: float = 0.0
    last_used_s: float = 0.0
    must_leave: bool = False
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """It was told to leave, and nobody uses it any more."""
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    """Why it could not be loaded the last time."""
    failed_s: float = 0.0

    def told_away(self) -> None:
        """It takes no new requests, and ends with the last answer."""
        self.entry.stage = Stage.LEAVING
        if not self.num_users:
            self.may_end.set()

    def admit(self) -> None:
        """It is here: whoever waits uses it from now on, and before anybody can tell it to leave."""
        self.entry.stage = Stage.HERE
        for waiting in self._taken_from_waiting():
            self.num_users += 1
            waiting.set_result(None)

    def refuse(self, error: Exception) -> None:
        """Tell everybody who waits."""
        for waiting in self._taken_from_waiting():
            waiting.set_exception(error)

    def _taken_from_waiting(self) -> list[asyncio.Future[None]]:
        """But for those who were broken off a moment ago: their tasks have not come round to say so."""
        waiting = [one for one in self.waiting if not one.done()]
        self.waiting.clear()
        return waiting


class ModelPark:
    """All models of a server within one memory."""

    def __init__(
        self,
        models: Iterable[tuple[ParkedModel, ModelEntry]],
        opening: OpenClient,
        weigh: Weigh = weightless,
        limits: ParkLimits | None = None,
    ) -> None:
        self._residents = {model.name: _Resident(model, entry) for model, entry in models}
        self._opening = opening
        self._weigh = weigh
        self._limits = limits or ParkLimits()
        self._sizes: Sizes | None = None
        self._turn = asyncio.Lock()
        """Models load one after the other: two at once would take as long, and each would come later."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models that are kept. Raises what stands in the way of one of them."""
        self._sizes = await self._weigh()
        for why in self._sizes.problems.values():
            log.warning("%s", why)
        kept = [resident for resident in self._residents.values() if resident.model.is_kept]
        await asyncio.gather(*(self._wait(resident) for resident in kept))
        for resident in kept:
            self._release(resident)
        self._look()

    def drain(self) -> None:
        """The server ends: no model is loaded any more, and who waits for one is told."""
        self._is_closing = True
        for resident in self._residents.values():
            resident.refuse(DrainingError("the server is shutting down and loads no model; ask another one, or later"))

    async def close(self) -> None:
        """End all of them. One that loads is broken off."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        tasks = [(resident, resident.task) for resident in self._residents.values() if resident.task is not None]
        for resident, task in tasks:
            resident.may_end.set()
            if resident.entry.stage is Stage.LOADING:
                task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    @property
    def is_started(self) -> bool:
        """It is known what there is."""
        return self._sizes is not None

    async def _live(self, resident: _Resident) -> None:
        """One model from its loading to its end."""
        entry = resident.entry
        try:
            async with AsyncExitStack() as stack:
                async with self._turn:
                    self._tell(resident, "is being loaded")
                    client = await stack.enter_async_context(self._opening(resident.model, entry.tell_progress))
                self._arrive(resident, client)
                await resident.may_end.wait()
                entry.engine_client = None
                self._tell(resident, "is being unloaded")
        except QuireError as error:
            self._fail(resident, error)
        except Exception as error:
            log.exception("%s could not be loaded", entry.name)
            self._fail(resident, error)
        finally:
            entry.engine_client, entry.stage = None, Stage.AWAY
            entry.tell_progress("", 0, 0)
            resident.must_leave, resident.task = False, None
            resident.may_end.clear()
            self._look()

    def _arrive(self, resident: _Resident, client: EngineClient) -> None:
        resident.entry.engine_client, resident.failure = client, None
        resident.here_since_s = resident.last_used_s = monotonic()
        self._tell(resident, f"is ready: {client.text.info.line}")
        resident.admit()
        self._look()

    @staticmethod
    def _tell(resident: _Resident, words: str) -> None:
        """To the log. Of models that are kept whoever starts the server tells."""
        if not resident.model.is_kept:
            log.info("%s %s", resident.entry.name, words)

    @staticmethod
    def _fail(resident: _Resident, error: Exception) -> None:
        resident.failure, resident.failed_s = error, monotonic()
        if not resident.model.is_kept:
            log.error("%s could not be loaded: %s", resident.entry.name, error)
        resident.refuse(error)

    # -- requests ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, entry: ModelEntry) -> AsyncIterator[EngineClient]:
        """The model's front; waits until it is there. It does not leave before it is given back."""
        resident = self._residents[entry.name]
        await self._come(resident)
        try:
            yield entry.open()
        finally:
            self._release(resident)

    async def _come(self, resident: _Resident) -> None:
        entry = resident.entry
        if entry.stage is Stage.HERE and entry.is_dead and not resident.model.is_kept:
            resident.must_leave = True
            resident.told_away()
        if entry.stage is Stage.HERE:
            resident.num_users += 1
            resident.last_used_s = monotonic()
            return
        self.check_waiting(entry)
        try:
            await self._wait(resident)
        except (CheckpointError, ConfigError) as error:
            raise _not_loaded(entry, error, FAILED_RETRY_S) from error

    def check_waiting(self, entry: ModelEntry) -> None:
        """Refuse who would wait in vain, or beside too many."""
        resident = self._residents[entry.name]
        if entry.stage is Stage.HERE:
            return
        if self._is_closing:
            raise DrainingError("the server is shutting down and loads no model; ask another one, or later")
        if self._sizes is None:
            return
        if problem := self._sizes.problems.get(entry.name):
            raise ApiError(503, "model_not_here", problem)
        self._check_fits(resident, self._sizes)
        again_s = resident.failed_s + FAILED_RETRY_S - monotonic()
        if resident.failure is not None and again_s > 0:
            raise _not_loaded(entry, resident.failure, again_s)
        if len(resident.waiting) >= self._limits.max_waiting:
            message = (
                f"{self._limits.max_waiting} requests may wait for {entry.name} to be loaded, "
                f"{len(resident.waiting)} do; try again"
            )
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)

    def _check_fits(self, resident: _Resident, sizes: Sizes) -> None:
        name, known = resident.entry.name, [self._parked(one) for one in self._residents.values()]
        wanted = self._parked(resident)
        blocking = in_its_way(wanted, known, sizes.memory_bytes)
        if not blocking:
            return
        need = f"{name} needs {wanted.needed_bytes / GIB:,.2f} of {sizes.memory_bytes / GIB:,.2f} GiB"
        if blocking == [name]:
            raise invalid(f"{need}; the operator has to give more --memory", "model", "model_does_not_fit")
        raise invalid(
            f"{need} and does not fit beside what is kept: {', '.join(blocking)} would have to go",
            "model",
            "model_does_not_fit",
        )

    async def _wait(self, resident: _Resident) -> None:
        """Until the model is there; whoever returns from here uses it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resident.waiting[future] = monotonic()
        self._look()
        try:
            await future
        except asyncio.CancelledError:
            if resident.waiting.pop(future, None) is not None:
                self._look()  # perhaps nobody needs the room any more
            elif not future.cancelled() and future.exception() is None:
                self._release(resident)
            raise

    def _release(self, resident: _Resident) -> None:
        resident.num_users -= 1
        resident.last_used_s = monotonic()
        if resident.num_users:
            return  # nothing is decided by how many they are
        if resident.entry.stage is Stage.LEAVING:
            resident.may_end.set()
        self._look()

    # -- the operator --------------------------------------------------------------------------------------------------

    async def load(self, entry: ModelEntry) -> None:
        """Until it is there."""
        async with self.using(entry):
            pass

    def unload(self, entry: ModelEntry) -> None:
        """It leaves with its last answer."""
        resident = self._residents[entry.name]
        if resident.model.is_kept:
            raise invalid(f"{entry.name} is kept; a model leaves if it is not named on the command line, and its table "
                          "has no keep = true", "model")  # fmt: skip
        if entry.stage is Stage.LOADING:
            raise ApiError(409, "model_loading", f"{entry.name} is being loaded; unload it when it is there")
        if entry.stage is Stage.HERE:
            resident.must_leave = True
            resident.told_away()

    # -- what is decided -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Do what is to be done now. Called whenever something has changed."""
        if self._is_closing or self._sizes is None:
            return
        now_s = monotonic()
        known = [self._parked(resident) for resident in self._residents.values()]
        moves = next_moves(known, self._sizes.memory_bytes, self._limits.min_stay_s, now_s)
        for name in moves.load:
            resident = self._residents[name]
            resident.entry.stage = Stage.LOADING
            resident.task = asyncio.create_task(self._live(resident), name=f"quire-model-{name}")
        for name in moves.leave:
            self._residents[name].told_away()
        for name in moves.stay:
            self._residents[name].admit()
        self._look_again(moves, now_s)

    def _look_again(self, moves: Moves, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moves.look_again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(moves.look_again_s - now_s, self._look)

    def _parked(self, resident: _Resident) -> Parked:
        needed = {} if self._sizes is None else self._sizes.needed_bytes
        idle_s = self._limits.idle_s if resident.model.idle_s is None else resident.model.idle_s
        return Parked(
            name=resident.entry.name,
            needed_bytes=needed.get(resident.entry.name, 0),
            stage=resident.entry.stage,
            is_kept=resident.model.is_kept and resident.failure is None,
            idle_s=idle_s,
            num_users=resident.num_users,
            waiting_since_s=min(resident.waiting.values(), default=None),
            here_since_s=resident.here_since_s,
            last_used_s=resident.last_used_s,
            must_leave=resident.must_leave,
        )


def _not_loaded(entry: ModelEntry, error: Exception, again_s: float) -> ApiError:
    return ApiError(503, "model_not_loaded", f"{entry.name} could not be loaded: {error}", retry_after_s=again_s)
