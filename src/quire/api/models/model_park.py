"""Load and unload models on demand: carry out the moves of `park_moves.py`, and let requests wait for their model.

    using(model) ──► ready: at once ───────────────────────┬─► uses the model until the last byte of the response,
                └──► unloaded, loading, unloading: waits ──┘   or until the request is suspended

Runs on one event loop. One task per model runs from the start of loading to the end of unloading. When a model is
unloaded while requests run, they are suspended: their state stays in this process, only the worker ends, and a new
worker continues them when the model is loaded again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from quire.api.http.errors import ApiError, invalid
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.models.park_moves import (
    LOADS_S,
    MAX_LOADS,
    OPERATOR,
    Load,
    Parked,
    Stage,
    Wish,
    in_its_way,
    may_load_s,
    next_moves,
)
from quire.api.models.registry import ModelEntry, Models
from quire.client.engines.client import EngineClient
from quire.config.parked_models import OnDemandModel
from quire.errors import CheckpointError, ConfigError, DrainingError, InvariantError, QuireError

log = logging.getLogger("quire.park")
GIB = 1 << 30
FAILED_RETRY_S = 10.0
"""Seconds after a failed load before the next attempt."""

ReportProgress = Callable[[str, int, int], None]
"""Called with a label of the current stage, the bytes done, and the total bytes."""
OpenClient = Callable[[OnDemandModel, ReportProgress], AbstractAsyncContextManager[EngineClient]]
"""Opens a client with its engine; both end with the context."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The memory budget, and the memory that each model needs."""

    memory_bytes: int = 0
    needed_bytes: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """By model name: why it cannot be loaded."""


Weigh = Callable[[], Awaitable[Sizes]]
"""Measures the sizes once. It reads files, and downloads models that are always loaded."""


async def weightless() -> Sizes:
    """Return sizes with which all models always fit."""
    return Sizes()


@dataclass(frozen=True, slots=True)
class ParkLimits:
    """The operator's settings for loading and unloading."""

    max_waiting: int = 2048
    """Maximum number of requests that wait for one model to be loaded."""
    idle_s: float | None = None
    """Idle time before unloading, for models without their own setting; None: never."""
    turn_s: float = 30.0
    """Minimum time a loaded model serves all tenants, even if tenants wait for its memory."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A request's reference to its model."""

    resident: "_ModelSlot"
    client: EngineClient
    tenant: str
    users: Counter[str]
    """The model's user counter at the request's arrival; after a reload the model has a new counter."""


Arrival = asyncio.Future[_Place]


@dataclass(slots=True, eq=False)
class _ModelSlot:
    """One model, loaded or not."""

    model: OnDemandModel
    entry: ModelEntry
    users: Counter[str] = field(default_factory=Counter)
    """Number of requests that use the model, by tenant. If the model is unloaded: the suspended requests."""
    served: set[str] = field(default_factory=set)
    """Tenants that have used the model since its last load."""
    waiting: dict[str, dict[Arrival, float]] = field(default_factory=dict)
    """Requests waiting for the model, by tenant, in order of arrival, each with its arrival time."""
    turn_ends_s: float = 0.0
    leaving_since_s: float = 0.0
    last_used_s: float = 0.0
    must_leave: bool = False
    is_aside: bool = False
    """The model is unloaded and has suspended requests."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an unloading model serves no request any more, or must suspend those that it serves."""
    is_called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when suspended requests continue, or when none is left."""
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    """Why the last attempt to load the model failed."""
    failed_s: float = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """One entry per tenant that waits for the model, with the time since when."""
        wishes = [Wish(tenant, next(iter(arrivals.values()))) for tenant, arrivals in self.waiting.items()]
        if self.is_aside:
            wishes += [Wish(one, self.leaving_since_s, True) for one in self.users if one not in self.waiting]
        return tuple(wishes)

    def leave(self) -> None:
        """Start to unload: accept no new requests, and end after the last response."""
        self.entry.stage, self.leaving_since_s = Stage.LEAVING, monotonic()
        if not self.users:
            self.may_end.set()

    def begin_turn(self, turn_s: float) -> None:
        """Mark the model as ready, and give it to all waiting requests before any move can unload it."""
        client = self.entry.engine_client
        if client is None:
            raise InvariantError(f"expected a client for {self.entry.name}, got none")
        self.entry.stage, self.turn_ends_s = Stage.HERE, monotonic() + turn_s
        self.served = set(self.users)
        for tenant, arrival in self._taken_from_waiting():
            arrival.set_result(self.use(client, tenant))

    def use(self, client: EngineClient, tenant: str) -> _Place:
        self.users[tenant] += 1
        self.served.add(tenant)
        self.last_used_s = monotonic()
        return _Place(self, client, tenant, self.users)

    def refuse(self, error: Exception) -> None:
        for _, arrival in self._taken_from_waiting():
            arrival.set_exception(error)

    def _taken_from_waiting(self) -> list[tuple[str, Arrival]]:
        """Clear the waiting list and return it without cancelled requests, whose tasks have not run since."""
        waiting = [(tenant, one) for tenant, arrivals in self.waiting.items() for one in arrivals if not one.done()]
        self.waiting.clear()
        return waiting


class ModelManager(Models):
    """All models of a server, sharing one memory budget."""

    def __init__(
        self,
        models: Sequence[tuple[OnDemandModel, ModelEntry]],
        opening: OpenClient,
        weigh: Weigh = weightless,
        limits: ParkLimits | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__((entry for _, entry in models), aliases)
        self.residents = {model.name: _ModelSlot(model, entry) for model, entry in models}
        self._opening = opening
        self._weigh = weigh
        self._limits = limits or ParkLimits()
        self._sizes: Sizes | None = None
        self._loads: dict[str, tuple[float, ...]] = {}
        """Times at which each tenant's last loads began."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Running tasks of models."""
        self._loading = asyncio.Lock()
        """Models load one at a time: two at once would take as long in total, and each would be ready later."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    # -- start and end -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models that are always loaded. Raises the error if one of them cannot be loaded."""
        self._sizes = await self._weigh()
        for why in self._sizes.problems.values():
            log.warning("%s", why)
        kept = [resident for resident in self.residents.values() if resident.model.is_kept]
        for held in await asyncio.gather(*(self._wait(resident, OPERATOR) for resident in kept)):
            self._release(held)

    def drain(self) -> None:
        self._is_closing = True
        for resident in self.residents.values():
            resident.refuse(
                DrainingError("the server is shutting down and loads no model; use another one, or retry later")
            )
            resident.is_called.set()  # suspended requests end here

    async def close(self) -> None:
        """Unload all models. A load in progress is cancelled."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        for resident in self.residents.values():
            resident.may_end.set()
            if resident.task is not None and resident.entry.stage is Stage.LOADING:
                resident.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        return self._sizes is not None and super().is_ready

    async def _live(self, resident: _ModelSlot, before: asyncio.Task[None] | None) -> None:
        """Run one model from loading to unloading, after its previous task has ended."""
        entry = resident.entry
        try:
            if before is not None:
                await asyncio.wait({before})
            async with AsyncExitStack() as stack:
                async with self._loading:
                    self._log(resident, "is being loaded")
                    client = await stack.enter_async_context(self._opening(resident.model, entry.report_progress))
                self._arrive(resident, client)
                await self._stay(resident, client)
        except QuireError as error:
            self._fail(resident, error)
        except Exception as error:
            log.exception("%s could not be loaded", entry.name)
            self._fail(resident, error)
        finally:
            self._end(resident)

    async def _stay(self, resident: _ModelSlot, client: EngineClient) -> None:
        """Wait until the model is unloaded. With suspended requests, unload it and later load it again."""
        while await resident.may_end.wait():
            resident.entry.engine_client = None
            self._log(resident, "is being unloaded")
            if not resident.users or self._is_closing:
                return
            await client.set_aside()
            self._log(resident, f"was unloaded; {resident.users.total()} requests wait until it is loaded again")
            if not await self._called(resident):
                return
            async with self._loading:
                self._log(resident, "is being loaded")
                await client.go_on()
            self._arrive(resident, client)

    async def _called(self, resident: _ModelSlot) -> bool:
        """Wait until the unloaded model is to be loaded again; false: no suspended request is left."""
        resident.entry.stage, resident.is_aside = Stage.AWAY, True
        resident.entry.report_progress("", 0, 0)
        resident.may_end.clear()
        resident.is_called.clear()
        if self._is_closing or not resident.users:
            resident.is_called.set()
        self.apply_moves()
        await resident.is_called.wait()
        resident.is_aside = False
        return resident.entry.stage is Stage.LOADING and not self._is_closing

    def _end(self, resident: _ModelSlot) -> None:
        """Clean up after the task. Requests that still used the model find that it has ended."""
        resident.users = Counter()
        if resident.task is not asyncio.current_task():
            return  # a new task has begun
        resident.entry.engine_client, resident.entry.stage = None, Stage.AWAY
        resident.entry.report_progress("", 0, 0)
        resident.must_leave, resident.task = False, None
        resident.may_end.clear()
        self.apply_moves()

    def _arrive(self, resident: _ModelSlot, client: EngineClient) -> None:
        resident.entry.engine_client, resident.failure = client, None
        resident.last_used_s = monotonic()
        self._log(resident, f"is ready: {client.text.info.line}")
        resident.begin_turn(self._limits.turn_s)
        self.apply_moves()

    @staticmethod
    def _log(resident: _ModelSlot, text: str) -> None:
        """Log a state change. The caller that starts the server reports models that are always loaded."""
        if not resident.model.is_kept:
            log.info("%s %s", resident.entry.name, text)

    @staticmethod
    def _fail(resident: _ModelSlot, error: Exception) -> None:
        resident.failure, resident.failed_s = error, monotonic()
        if not resident.model.is_kept:
            log.error("%s could not be loaded: %s", resident.entry.name, error)
        resident.refuse(error)

    # -- requests ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, entry: ModelEntry, tenant: str, /) -> AsyncIterator[EngineClient]:
        """Yield the model's client. The model is not unloaded until the request ends or is suspended."""
        resident = self.residents[entry.name]
        held = await self._come(resident, tenant)
        try:
            yield held.client
        finally:
            self._release(held)

    async def _come(self, resident: _ModelSlot, tenant: str) -> _Place:
        entry = resident.entry
        if entry.stage is Stage.HERE and not resident.model.is_kept and entry.is_dead:
            resident.must_leave = True
            resident.leave()
        if entry.stage is Stage.HERE:
            return resident.use(entry.open(), tenant)
        self.check_waiting(entry, tenant)
        try:
            return await self._wait(resident, tenant)
        except (CheckpointError, ConfigError) as error:
            raise _not_loaded(entry, error, FAILED_RETRY_S) from error

    def check_waiting(self, entry: ModelEntry, tenant: str, /) -> None:
        resident = self.residents[entry.name]
        if entry.stage is Stage.HERE:
            return
        if self._is_closing:
            raise DrainingError("the server is shutting down and loads no model; use another one, or retry later")
        if self._sizes is None:
            return
        if problem := self._sizes.problems.get(entry.name):
            raise ApiError(503, "model_not_here", problem)
        self._check_fits(resident, self._sizes)
        again_s = resident.failed_s + FAILED_RETRY_S - monotonic()
        if resident.failure is not None and again_s > 0:
            raise _not_loaded(entry, resident.failure, again_s)
        if resident.num_waiting >= self._limits.max_waiting:
            message = (
                f"expected at most {self._limits.max_waiting} requests waiting for {entry.name}, "
                f"{resident.num_waiting} are waiting; try again"
            )
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)
        if entry.stage is not Stage.LOADING and not resident.waiting:
            self._check_loads(entry, tenant)

    def _check_loads(self, entry: ModelEntry, tenant: str) -> None:
        planned = [one for one in self.residents.values() if one.entry.stage is not Stage.LOADING]
        num_planned = sum(tenant in one.waiting for one in planned)
        wait_s = may_load_s(tenant, self._loads, monotonic(), num_planned)
        if wait_s > 0:
            message = (
                f"expected at most {MAX_LOADS} model loads per key in {LOADS_S:g} s, {entry.name} would be one more; "
                f"use a model that is ready, or try again in {ceil(wait_s)} s"
            )
            raise ApiError(429, "rate_limit_exceeded", message, "model", wait_s)

    def _check_fits(self, resident: _ModelSlot, sizes: Sizes) -> None:
        name, known = resident.entry.name, [self._parked(one) for one in self.residents.values()]
        wanted = self._parked(resident)
        blocking = in_its_way(wanted, known, sizes.memory_bytes)
        if not blocking:
            return
        need = f"{name} needs {wanted.needed_bytes / GIB:,.2f} of {sizes.memory_bytes / GIB:,.2f} GiB"
        if blocking == [name]:
            raise invalid(f"{need}; the operator has to raise --memory", "model", "model_does_not_fit")
        raise invalid(
            f"{need} and does not fit beside the models that are kept: {', '.join(blocking)}",
            "model",
            "model_does_not_fit",
        )

    async def _wait(self, resident: _ModelSlot, tenant: str) -> _Place:
        """Wait until the model is loaded; a request that returns from here uses it."""
        arrival: Arrival = asyncio.get_running_loop().create_future()
        arrivals = resident.waiting.setdefault(tenant, {})
        arrivals[arrival] = monotonic()
        if len(arrivals) == 1:
            self.apply_moves()  # further requests of a tenant do not change the decision
        try:
            return await arrival
        except asyncio.CancelledError:
            if resident.waiting.get(tenant, {}).pop(arrival, None) is not None:
                if not arrivals:
                    del resident.waiting[tenant]
                self.apply_moves()  # its memory may no longer be needed
            elif not arrival.cancelled() and arrival.exception() is None:
                self._release(arrival.result())
            raise

    def _release(self, held: _Place) -> None:
        resident, users, tenant = held.resident, held.users, held.tenant
        users[tenant] -= 1
        if users is not resident.users:
            return  # the request belonged to an earlier load of the model
        resident.last_used_s = monotonic()
        if users[tenant]:
            return  # decisions depend on whether a tenant has requests, not on how many
        del users[tenant]
        if not users and resident.entry.stage is Stage.LEAVING:
            resident.may_end.set()
        if not users and resident.is_aside:
            resident.is_called.set()
        self.apply_moves()

    # -- the operator --------------------------------------------------------------------------------------------------

    async def load(self, entry: ModelEntry) -> None:
        """Load a model, and return when it is ready."""
        async with self.using(entry, OPERATOR):
            pass

    def unload(self, entry: ModelEntry) -> None:
        """Unload a model after its last response."""
        resident = self.residents[entry.name]
        if resident.model.is_kept:
            raise invalid(f"{entry.name} is kept; a model can be unloaded if it is not named on the command line, "
                          "and its table has no keep = true", "model")  # fmt: skip
        if entry.stage is Stage.LOADING:
            raise ApiError(409, "model_loading", f"{entry.name} is being loaded; unload it when it is ready")
        if entry.stage is Stage.HERE:
            resident.must_leave = True
            resident.leave()

    # -- moves ---------------------------------------------------------------------------------------------------------

    def apply_moves(self) -> None:
        """Carry out all moves that are due now. Called after every change."""
        if self._is_closing or self._sizes is None:
            return
        is_settled = False
        while not is_settled:
            now_s = monotonic()
            known = [self._parked(resident) for resident in self.residents.values()]
            moves = next_moves(known, self._sizes.memory_bytes, self._loads, now_s)
            for name in moves.leave:
                self.residents[name].leave()
            for name in moves.set_aside:
                self.residents[name].may_end.set()
            for name in moves.stay:
                self.residents[name].begin_turn(self._limits.turn_s)
            if moves.load is not None:
                self._begin_load(moves.load, now_s)
            is_settled = moves.load is None and not moves.leave
        self._set_timer(moves.check_again_s, now_s)

    def _begin_load(self, load: Load, now_s: float) -> None:
        resident = self.residents[load.name]
        resident.entry.stage = Stage.LOADING
        if load.tenant != OPERATOR:
            self._loads[load.tenant] = (*self._loads.get(load.tenant, ())[1 - MAX_LOADS :], now_s)
        if resident.is_aside:
            resident.is_called.set()
        else:
            living = self._live(resident, resident.task)
            resident.task = asyncio.create_task(living, name=f"quire-model-{load.name}")
            self._tasks.add(resident.task)
            resident.task.add_done_callback(self._tasks.discard)

    def _set_timer(self, check_again_s: float | None, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if check_again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(check_again_s - now_s, self.apply_moves)

    def _parked(self, resident: _ModelSlot) -> Parked:
        needed = {} if self._sizes is None else self._sizes.needed_bytes
        idle_s = self._limits.idle_s if resident.model.idle_s is None else resident.model.idle_s
        return Parked(
            name=resident.entry.name,
            needed_bytes=needed.get(resident.entry.name, 0),
            stage=resident.entry.stage,
            is_kept=resident.model.is_kept and resident.failure is None,
            idle_s=idle_s,
            users=frozenset(resident.users),
            served=frozenset(resident.served),
            wishes=resident.wishes,
            turn_ends_s=resident.turn_ends_s,
            leaving_since_s=resident.leaving_since_s,
            last_used_s=resident.last_used_s,
            must_leave=resident.must_leave,
            is_ending=resident.may_end.is_set(),
        )


def _not_loaded(entry: ModelEntry, error: Exception, again_s: float) -> ApiError:
    return ApiError(503, "model_not_loaded", f"{entry.name} could not be loaded: {error}", retry_after_s=again_s)
