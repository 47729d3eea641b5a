"""Load and unload models on demand: carry out the decisions of `park_moves.py`, and let requests wait for their model.

    using(model) ──► ready: at once ───────────────────────┬─► the request uses the model until its last byte is sent,
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
    ModelState,
    Stage,
    Waiter,
    blocking_models,
    load_wait_s,
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
    """By model name: why the model cannot be loaded."""


MeasureSizes = Callable[[], Awaitable[Sizes]]
"""Measures the sizes once: reads files, and downloads models that are always loaded."""


async def no_sizes() -> Sizes:
    """Return sizes of zero, with which all models always fit."""
    return Sizes()


@dataclass(frozen=True, slots=True)
class OnDemandLimits:
    """The operator's settings for loading and unloading."""

    max_waiting: int = 2048
    """Maximum number of requests that wait for one model to be loaded."""
    idle_s: float | None = None
    """Idle time before unloading, for models without their own setting; None: never."""
    turn_s: float = 30.0
    """Minimum time for which a model stays loaded, even if tenants wait for its memory."""


@dataclass(frozen=True, slots=True, eq=False)
class _ModelUse:
    """One request's use of a loaded model."""

    slot: "_ModelSlot"
    client: EngineClient
    tenant: str
    users: Counter[str]
    """The model's user counter when the use began; after a reload the model has a new counter."""


Arrival = asyncio.Future[_ModelUse]
"""The future of a request that waits for its model."""


@dataclass(slots=True, eq=False)
class _ModelSlot:
    """One model of the server, loaded or not."""

    model: OnDemandModel
    entry: ModelEntry
    users: Counter[str] = field(default_factory=Counter)
    """Number of requests that use the model, by tenant; while the model is unloaded, the suspended requests."""
    served: set[str] = field(default_factory=set)
    """Tenants that have used the model since its last load."""
    waiting: dict[str, dict[Arrival, float]] = field(default_factory=dict)
    """By tenant: requests that wait for the model, in order of arrival, each with its arrival time."""
    turn_ends_s: float = 0.0
    unloading_since_s: float = 0.0
    last_used_s: float = 0.0
    must_unload: bool = False
    is_suspended: bool = False
    """Whether the model is unloaded and has suspended requests."""
    serving_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an unloading model has no running request any more, or must suspend the running ones."""
    suspension_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the suspended requests are to continue, or when none is left."""
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    """Why the last attempt to load the model failed."""
    failed_s: float = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def waiters(self) -> tuple[Waiter, ...]:
        """One entry per tenant that waits for the model, with the time at which it began to wait."""
        waiters = [Waiter(tenant, next(iter(arrivals.values()))) for tenant, arrivals in self.waiting.items()]
        if self.is_suspended:
            tenants = [tenant for tenant in self.users if tenant not in self.waiting]
            waiters += [Waiter(tenant, self.unloading_since_s, is_suspended=True) for tenant in tenants]
        return tuple(waiters)

    def begin_unload(self) -> None:
        """Start to unload: accept no new requests, and unload after the last response."""
        self.entry.stage, self.unloading_since_s = Stage.UNLOADING, monotonic()
        if not self.users:
            self.serving_over.set()

    def begin_turn(self, turn_s: float) -> None:
        """Mark the model as ready and resume all waiting requests, so that no move unloads it before they use it."""
        client = self.entry.engine_client
        if client is None:
            raise InvariantError(f"expected a client for {self.entry.name}, got none")
        self.entry.stage, self.turn_ends_s = Stage.READY, monotonic() + turn_s
        self.served = set(self.users)
        for tenant, arrival in self._pop_waiting():
            arrival.set_result(self.use(client, tenant))

    def use(self, client: EngineClient, tenant: str) -> _ModelUse:
        self.users[tenant] += 1
        self.served.add(tenant)
        self.last_used_s = monotonic()
        return _ModelUse(self, client, tenant, self.users)

    def refuse(self, error: Exception) -> None:
        for _, arrival in self._pop_waiting():
            arrival.set_exception(error)

    def _pop_waiting(self) -> list[tuple[str, Arrival]]:
        """Clear the waiting list and return it without requests that were cancelled but not removed yet."""
        pairs = [(tenant, arrival) for tenant, arrivals in self.waiting.items() for arrival in arrivals]
        self.waiting.clear()
        return [(tenant, arrival) for tenant, arrival in pairs if not arrival.done()]


class ModelManager(Models):
    """All models of a server, sharing one memory budget."""

    def __init__(
        self,
        models: Sequence[tuple[OnDemandModel, ModelEntry]],
        open_client: OpenClient,
        measure_sizes: MeasureSizes = no_sizes,
        limits: OnDemandLimits | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__((entry for _, entry in models), aliases)
        self.slots = {model.name: _ModelSlot(model, entry) for model, entry in models}
        self._open_client = open_client
        self._measure_sizes = measure_sizes
        self._limits = limits or OnDemandLimits()
        self._sizes: Sizes | None = None
        self._loads: dict[str, tuple[float, ...]] = {}
        """Start times of each tenant's last loads."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Running tasks, at most two per model: a new one waits for the previous one."""
        self._load_lock = asyncio.Lock()
        """Models load one at a time: two at once would take as long in total, and each would be ready later."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    # -- start and end -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models that are always loaded. Raises the error if one of them cannot be loaded."""
        self._sizes = await self._measure_sizes()
        for problem in self._sizes.problems.values():
            log.warning("%s", problem)
        permanent = [slot for slot in self.slots.values() if slot.model.is_kept]
        for use in await asyncio.gather(*(self._wait(slot, OPERATOR) for slot in permanent)):
            self._release(use)

    def drain(self) -> None:
        self._is_closing = True
        for slot in self.slots.values():
            slot.refuse(
                DrainingError("the server is shutting down and loads no model; use another one, or retry later")
            )
            slot.suspension_over.set()  # suspended requests end here

    async def close(self) -> None:
        """Unload all models. A load in progress is cancelled."""
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        for slot in self.slots.values():
            slot.serving_over.set()
            if slot.task is not None and slot.entry.stage is Stage.LOADING:
                slot.task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        return self._sizes is not None and super().is_ready

    async def _run_model(self, slot: _ModelSlot, previous: asyncio.Task[None] | None) -> None:
        """Run one model from loading to unloading, after its previous task has ended."""
        entry = slot.entry
        try:
            if previous is not None:
                await asyncio.wait({previous})
            async with AsyncExitStack() as stack:
                async with self._load_lock:
                    self._log(slot, "is being loaded")
                    client = await stack.enter_async_context(self._open_client(slot.model, entry.report_progress))
                self._become_ready(slot, client)
                await self._serve(slot, client)
        except QuireError as error:
            self._record_failure(slot, error)
        except Exception as error:
            log.exception("%s could not be loaded", entry.name)
            self._record_failure(slot, error)
        finally:
            self._clean_up(slot)

    async def _serve(self, slot: _ModelSlot, client: EngineClient) -> None:
        """Return when the model is to be unloaded. With suspended requests, unload it here and later load it again."""
        while await slot.serving_over.wait():
            slot.entry.engine_client = None
            self._log(slot, "is being unloaded")
            if not slot.users or self._is_closing:
                return
            await client.suspend()
            self._log(slot, f"was unloaded; {slot.users.total()} requests wait until it is loaded again")
            if not await self._wait_suspended(slot):
                return
            async with self._load_lock:
                self._log(slot, "is being loaded")
                await client.resume()
            self._become_ready(slot, client)

    async def _wait_suspended(self, slot: _ModelSlot) -> bool:
        """Wait until the unloaded model is to be loaded again; false: no suspended request is left."""
        slot.entry.stage, slot.is_suspended = Stage.UNLOADED, True
        slot.entry.report_progress("", 0, 0)
        slot.serving_over.clear()
        slot.suspension_over.clear()
        if self._is_closing or not slot.users:
            slot.suspension_over.set()
        self.apply_moves()
        await slot.suspension_over.wait()
        slot.is_suspended = False
        return slot.entry.stage is Stage.LOADING and not self._is_closing

    def _clean_up(self, slot: _ModelSlot) -> None:
        """Clean up when the model's task ends. Requests that still use the model get errors from its closed client."""
        slot.users = Counter()
        if slot.task is not asyncio.current_task():
            return  # a new task has begun
        slot.entry.engine_client, slot.entry.stage = None, Stage.UNLOADED
        slot.entry.report_progress("", 0, 0)
        slot.must_unload, slot.task = False, None
        slot.serving_over.clear()
        self.apply_moves()

    def _become_ready(self, slot: _ModelSlot, client: EngineClient) -> None:
        slot.entry.engine_client, slot.failure = client, None
        slot.last_used_s = monotonic()
        self._log(slot, f"is ready: {client.text.info.line}")
        slot.begin_turn(self._limits.turn_s)
        self.apply_moves()

    @staticmethod
    def _log(slot: _ModelSlot, text: str) -> None:
        """Log a state change of an on-demand model; always-loaded models are reported when the server is ready."""
        if not slot.model.is_kept:
            log.info("%s %s", slot.entry.name, text)

    @staticmethod
    def _record_failure(slot: _ModelSlot, error: Exception) -> None:
        slot.failure, slot.failed_s = error, monotonic()
        if not slot.model.is_kept:
            log.error("%s could not be loaded: %s", slot.entry.name, error)
        slot.refuse(error)

    # -- requests ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, entry: ModelEntry, tenant: str, /) -> AsyncIterator[EngineClient]:
        """Yield the model's client. The model is not unloaded until the request ends or is suspended."""
        slot = self.slots[entry.name]
        use = await self._begin_use(slot, tenant)
        try:
            yield use.client
        finally:
            self._release(use)

    async def _begin_use(self, slot: _ModelSlot, tenant: str) -> _ModelUse:
        entry = slot.entry
        if entry.stage is Stage.READY and not slot.model.is_kept and entry.is_dead:
            slot.must_unload = True
            slot.begin_unload()
        if entry.stage is Stage.READY:
            return slot.use(entry.open(), tenant)
        self.check_waiting(entry, tenant)
        try:
            return await self._wait(slot, tenant)
        except (CheckpointError, ConfigError) as error:
            raise _not_loaded(entry, error, FAILED_RETRY_S) from error

    def check_waiting(self, entry: ModelEntry, tenant: str, /) -> None:
        slot = self.slots[entry.name]
        if entry.stage is Stage.READY:
            return
        if self._is_closing:
            raise DrainingError("the server is shutting down and loads no model; use another one, or retry later")
        if self._sizes is None:
            return
        if problem := self._sizes.problems.get(entry.name):
            raise ApiError(503, "model_not_here", problem)
        self._check_fits(slot, self._sizes)
        retry_after_s = slot.failed_s + FAILED_RETRY_S - monotonic()
        if slot.failure is not None and retry_after_s > 0:
            raise _not_loaded(entry, slot.failure, retry_after_s)
        if slot.num_waiting >= self._limits.max_waiting:
            message = (
                f"expected at most {self._limits.max_waiting} requests waiting for {entry.name}, "
                f"{slot.num_waiting} are waiting; try again"
            )
            raise ApiError(503, "model_loading", message, retry_after_s=LOADING_RETRY_S)
        if entry.stage is not Stage.LOADING and not slot.waiting:
            self._check_loads(entry, tenant)

    def _check_loads(self, entry: ModelEntry, tenant: str) -> None:
        not_loading = [slot for slot in self.slots.values() if slot.entry.stage is not Stage.LOADING]
        num_planned = sum(tenant in slot.waiting for slot in not_loading)
        wait_s = load_wait_s(tenant, self._loads, monotonic(), num_planned)
        if wait_s > 0:
            message = (
                f"expected at most {MAX_LOADS} model loads per key in {LOADS_S:g} s, {entry.name} would be one more; "
                f"use a model that is ready, or try again in {ceil(wait_s)} s"
            )
            raise ApiError(429, "rate_limit_exceeded", message, "model", wait_s)

    def _check_fits(self, slot: _ModelSlot, sizes: Sizes) -> None:
        name, states = slot.entry.name, [self._state_of(other) for other in self.slots.values()]
        state = self._state_of(slot)
        blocking = blocking_models(state, states, sizes.memory_bytes)
        if not blocking:
            return
        need = f"{name} needs {state.needed_bytes / GIB:,.2f} of {sizes.memory_bytes / GIB:,.2f} GiB"
        if blocking == [name]:
            raise invalid(f"{need}; the operator must raise --memory", "model", "model_does_not_fit")
        raise invalid(
            f"{need} and does not fit beside the models that stay loaded: {', '.join(blocking)}",
            "model",
            "model_does_not_fit",
        )

    async def _wait(self, slot: _ModelSlot, tenant: str) -> _ModelUse:
        """Wait until the model is loaded, and return the request's use of it."""
        arrival: Arrival = asyncio.get_running_loop().create_future()
        arrivals = slot.waiting.setdefault(tenant, {})
        arrivals[arrival] = monotonic()
        if len(arrivals) == 1:
            self.apply_moves()  # further requests of a tenant do not change the decision
        try:
            return await arrival
        except asyncio.CancelledError:
            if slot.waiting.get(tenant, {}).pop(arrival, None) is not None:
                if not arrivals:
                    del slot.waiting[tenant]
                self.apply_moves()  # the memory for the model may no longer be needed
            elif not arrival.cancelled() and arrival.exception() is None:
                self._release(arrival.result())
            raise

    def _release(self, use: _ModelUse) -> None:
        slot, users, tenant = use.slot, use.users, use.tenant
        users[tenant] -= 1
        if users is not slot.users:
            return  # the request belonged to an earlier load of the model
        slot.last_used_s = monotonic()
        if users[tenant]:
            return  # decisions depend on whether a tenant has requests, not on how many
        del users[tenant]
        if not users and slot.entry.stage is Stage.UNLOADING:
            slot.serving_over.set()
        if not users and slot.is_suspended:
            slot.suspension_over.set()
        self.apply_moves()

    # -- the operator --------------------------------------------------------------------------------------------------

    async def load(self, entry: ModelEntry) -> None:
        """Load a model, and return when it is ready."""
        async with self.using(entry, OPERATOR):
            pass

    def unload(self, entry: ModelEntry) -> None:
        """Unload a model after its last response."""
        slot = self.slots[entry.name]
        if slot.model.is_kept:
            raise invalid(f"{entry.name} always stays loaded: it is named on the command line or its table has keep = "
                          "true; unload another model", "model")  # fmt: skip
        if entry.stage is Stage.LOADING:
            raise ApiError(409, "model_loading", f"{entry.name} is being loaded; unload it when it is ready")
        if entry.stage is Stage.READY:
            slot.must_unload = True
            slot.begin_unload()

    # -- moves ---------------------------------------------------------------------------------------------------------

    def apply_moves(self) -> None:
        """Carry out all moves that are due now. Called after every change."""
        if self._is_closing or self._sizes is None:
            return
        is_settled = False
        while not is_settled:
            now_s = monotonic()
            states = [self._state_of(slot) for slot in self.slots.values()]
            moves = next_moves(states, self._sizes.memory_bytes, self._loads, now_s)
            for name in moves.unload:
                self.slots[name].begin_unload()
            for name in moves.suspend:
                self.slots[name].serving_over.set()
            for name in moves.keep:
                self.slots[name].begin_turn(self._limits.turn_s)
            if moves.load is not None:
                self._begin_load(moves.load, now_s)
            is_settled = moves.load is None and not moves.unload
        self._set_timer(moves.check_again_s, now_s)

    def _begin_load(self, load: Load, now_s: float) -> None:
        slot = self.slots[load.name]
        slot.entry.stage = Stage.LOADING
        if load.tenant != OPERATOR:
            self._loads[load.tenant] = (*self._loads.get(load.tenant, ())[1 - MAX_LOADS :], now_s)
        if slot.is_suspended:
            slot.suspension_over.set()
        else:
            slot.task = asyncio.create_task(self._run_model(slot, previous=slot.task), name=f"quire-model-{load.name}")
            self._tasks.add(slot.task)
            slot.task.add_done_callback(self._tasks.discard)

    def _set_timer(self, check_again_s: float | None, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if check_again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(check_again_s - now_s, self.apply_moves)

    def _state_of(self, slot: _ModelSlot) -> ModelState:
        needed_bytes = {} if self._sizes is None else self._sizes.needed_bytes
        return ModelState(
            name=slot.entry.name,
            needed_bytes=needed_bytes.get(slot.entry.name, 0),
            stage=slot.entry.stage,
            is_kept=slot.model.is_kept and slot.failure is None,
            idle_s=self._limits.idle_s if slot.model.idle_s is None else slot.model.idle_s,
            users=frozenset(slot.users),
            served=frozenset(slot.served),
            waiters=slot.waiters,
            turn_ends_s=slot.turn_ends_s,
            unloading_since_s=slot.unloading_since_s,
            last_used_s=slot.last_used_s,
            must_unload=slot.must_unload,
            is_unload_final=slot.serving_over.is_set(),
        )


def _not_loaded(entry: ModelEntry, error: Exception, retry_after_s: float) -> ApiError:
    return ApiError(503, "model_not_loaded", f"{entry.name} could not be loaded: {error}", retry_after_s=retry_after_s)
