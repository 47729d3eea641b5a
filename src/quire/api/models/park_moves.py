"""Decide which model to load and which to unload (the *moves*): a pure function of model states and waiting tenants.

    unloaded ──load──► loading ──► ready ──unload─► unloading ──► unloaded
                                     ▲                  │
                                     └───────keep───────┘   no tenant needs the memory any more

**Turns.** A ready model has a turn: until it ends, the model stays loaded, even if tenants wait for its memory.
Waiting tenants are served in the order in which they began to wait, but a load puts its tenant at the end of the queue,
so tenants take turns, no matter how many models each requests. A tenant may end a turn early if no other tenant used
the model and no request runs, but only a few times per minute, so that its own models do not constantly alternate.

**Unloading.** Among models whose turn has ended, one without requests is unloaded first, then one that serves only the
waiting tenant, then the least recently used. An unloading model accepts no requests. Its running requests delay the
unloading by at most MAX_UNLOAD_DELAY_S, and not at all if they belong to the tenant that waits for the memory. Then
they are suspended, and wait until their model is loaded again. Suspended requests never unload a model with running
requests of the same tenant, because the two models would only alternate.

**Loads.** The loads that a tenant may cause per minute are bounded; a tenant at the bound is skipped until it may load.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

OPERATOR = ""
"""The tenant name under which the operator's loads wait. These loads are not counted."""
MAX_UNLOAD_DELAY_S = 60.0
"""Maximum time for which running requests delay the unloading of their model."""
LOADS_S = 60.0
MAX_LOADS = 4
"""Maximum number of loads that one tenant may cause within LOADS_S."""
MAX_EARLY_LOADS = 3
"""A tenant with fewer loads within LOADS_S may end its own turn early."""

Loads = Mapping[str, tuple[float, ...]]
"""Start times of each tenant's last loads, in order; at most MAX_LOADS per tenant."""


class Stage(Enum):
    """The state of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class Waiter:
    """A tenant that waits for a model."""

    tenant: str
    since_s: float
    """When the tenant's oldest waiting request began to wait."""
    is_suspended: bool = False
    """Whether the tenant has only suspended requests for the model, and no new ones."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the decisions depend on, for one model."""

    name: str
    needed_bytes: int
    """Memory that the model takes from the start of loading to the end of unloading."""
    stage: Stage = Stage.UNLOADED
    is_kept: bool = False
    """Whether the model is loaded at server start and never unloaded."""
    idle_s: float | None = None
    """Time without requests after which the model is unloaded; None: never."""
    users: frozenset[str] = frozenset()
    """Tenants with running requests on the model or, if it is unloaded, with suspended requests."""
    served: frozenset[str] = frozenset()
    """Tenants that have used the model since its last load."""
    waiters: tuple[Waiter, ...] = ()
    """One for each tenant that waits for the model."""
    turn_ends_s: float = 0.0
    unloading_since_s: float = 0.0
    last_used_s: float = 0.0
    must_unload: bool = False
    """Whether to unload even if no memory is needed: the operator requested it, or the engine has stopped."""
    is_unload_final: bool = False
    """Whether the unloading can no longer be cancelled: no request runs, or the running ones are being suspended."""

    @property
    def needs_load(self) -> bool:
        """Whether the model is unloaded and should be loaded."""
        return self.stage is Stage.UNLOADED and (self.is_kept or bool(self.waiters))


@dataclass(frozen=True, slots=True)
class Load:
    """A model to load, and the tenant that causes it."""

    name: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do now. After a load or an unload, the caller calls `next_moves` again at once."""

    load: Load | None = None
    unload: tuple[str, ...] = ()
    """Models to unload: they accept no new requests, and are unloaded after their last response."""
    suspend: tuple[str, ...] = ()
    """Unloading models whose running requests are to be suspended."""
    keep: tuple[str, ...] = ()
    """Unloading models to keep loaded, because their memory is no longer needed."""
    check_again_s: float | None = None
    """When to decide again even if nothing else changes; None: never."""


@dataclass(frozen=True, slots=True)
class _QueuedLoad:
    """A model to load, and one tenant that waits for it."""

    model: ModelState
    waiter: Waiter
    since_s: float
    """The sort key: when the tenant began to wait, or its last load, whichever is later."""

    @property
    def suspendable_tenants(self) -> frozenset[str]:
        """Tenants whose running requests are suspended at once for this load: the waiting tenant, unless it has only
        suspended requests."""
        return frozenset() if self.waiter.is_suspended else frozenset({self.waiter.tenant})


def next_moves(models: Sequence[ModelState], memory_bytes: int, loads: Loads, now_s: float) -> Moves:
    """Return the moves that are due now. Moves in progress are not repeated."""
    free_bytes = memory_bytes - sum(model.needed_bytes for model in models if model.stage is not Stage.UNLOADED)
    queue, allowed_s = _load_queue(models, loads, now_s)
    first = next((load for load in queue if not blocking_models(load.model, models, memory_bytes)), None)
    if first is None:
        unload, idle_s = _idle_models(models, now_s)
        return Moves(unload=unload, keep=_models_to_keep(models), check_again_s=_earliest([idle_s, allowed_s]))
    if first.model.needed_bytes <= free_bytes:
        return Moves(load=Load(first.model.name, first.waiter.tenant))
    # Loads further back in the queue are not considered: they must not take the memory that is freed for this one.
    free_bytes += sum(model.needed_bytes for model in models if model.stage is Stage.UNLOADING)
    unload, turn_s = _models_to_unload(models, first, first.model.needed_bytes - free_bytes, loads, now_s)
    suspend, delay_s = _models_to_suspend(models, first.suspendable_tenants, now_s)
    return Moves(unload=unload, suspend=suspend, check_again_s=_earliest([turn_s, delay_s, allowed_s]))


def blocking_models(model: ModelState, models: Sequence[ModelState], memory_bytes: int) -> list[str]:
    """Return why `model` can never be loaded: the always-loaded models that leave too little memory, or itself if it
    exceeds the memory alone. Empty: it can be loaded."""
    if model.needed_bytes > memory_bytes:
        return [model.name]
    permanent = [other for other in models if other.is_kept and other.name != model.name]
    is_too_much = model.needed_bytes + sum(other.needed_bytes for other in permanent) > memory_bytes
    return [other.name for other in permanent] if is_too_much else []


def load_wait_s(tenant: str, loads: Loads, now_s: float, num_planned: int = 0) -> float:
    """Return the seconds until a tenant may cause one more load than the `num_planned` that it waits for; 0: now."""
    recent = _recent_loads(tenant, loads, now_s)
    num_over = len(recent) + num_planned - MAX_LOADS
    if tenant == OPERATOR or num_over < 0:
        return 0.0
    return LOADS_S if num_over >= len(recent) else recent[num_over] + LOADS_S - now_s


def _recent_loads(tenant: str, loads: Loads, now_s: float) -> list[float]:
    return [start_s for start_s in loads.get(tenant, ()) if start_s + LOADS_S > now_s]


def _load_queue(models: Sequence[ModelState], loads: Loads, now_s: float) -> tuple[list[_QueuedLoad], float | None]:
    """Return the loads in order, always-loaded models first; and when a tenant at its bound may load again."""
    queue: list[_QueuedLoad] = []
    allowed_s: list[float | None] = []
    for model in models:
        if not model.needs_load:
            continue
        if model.is_kept:
            queue.append(_QueuedLoad(model, Waiter(OPERATOR, 0.0), float("-inf")))
            continue
        waits_s = {waiter.tenant: load_wait_s(waiter.tenant, loads, now_s) for waiter in model.waiters}
        allowed_s += [now_s + wait_s for wait_s in waits_s.values() if wait_s > 0]
        queue += [
            _QueuedLoad(model, waiter, max([waiter.since_s, *loads.get(waiter.tenant, ())[-1:]]))
            for waiter in model.waiters
            if not waits_s[waiter.tenant]
        ]
    return sorted(queue, key=lambda load: load.since_s), _earliest(allowed_s)


def _models_to_unload(
    models: Sequence[ModelState], load: _QueuedLoad, missing_bytes: int, loads: Loads, now_s: float
) -> tuple[tuple[str, ...], float | None]:
    """Return the models to unload if they free enough memory; otherwise none, and when to check again."""
    ready = [model for model in models if model.stage is Stage.READY and not model.is_kept]
    ends_s = {model.name: _turn_ends_s(model, load.waiter.tenant, loads, now_s) for model in ready}
    unload, tenants = list[str](), load.suspendable_tenants
    for model in sorted(ready, key=lambda model: (bool(model.users - tenants), bool(model.users), model.last_used_s)):
        if missing_bytes > 0 and ends_s[model.name] <= now_s:
            missing_bytes -= model.needed_bytes
            unload.append(model.name)
    if missing_bytes <= 0:
        return tuple(unload), None
    return (), _earliest([end_s for end_s in ends_s.values() if end_s > now_s])


def _turn_ends_s(model: ModelState, tenant: str, loads: Loads, now_s: float) -> float:
    """Return when a model may be unloaded for this tenant: early if no other tenant used it in its turn."""
    may_end_early = model.served == {tenant} and len(_recent_loads(tenant, loads, now_s)) < MAX_EARLY_LOADS
    return now_s if not model.users and (may_end_early or not model.served) else model.turn_ends_s


def _models_to_suspend(
    models: Sequence[ModelState], tenants: frozenset[str], now_s: float
) -> tuple[tuple[str, ...], float | None]:
    """Return the models whose requests must be suspended now (at once for `tenants`), and when the next ones must."""
    busy = [model for model in models if model.stage is Stage.UNLOADING and model.users and not model.is_unload_final]
    delay_ends_s = {model.name: model.unloading_since_s + MAX_UNLOAD_DELAY_S for model in busy}
    due = [model.name for model in busy if model.users <= tenants or delay_ends_s[model.name] <= now_s]
    return tuple(due), _earliest([end_s for name, end_s in delay_ends_s.items() if name not in due])


def _models_to_keep(models: Sequence[ModelState]) -> tuple[str, ...]:
    """Return the models that were unloading for a tenant that no longer waits."""
    busy = [model for model in models if model.stage is Stage.UNLOADING and model.users]
    return tuple(model.name for model in busy if not model.must_unload and not model.is_unload_final)


def _idle_models(models: Sequence[ModelState], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Return the models to unload after their idle time, and when the next one is due."""
    ends_s = {
        model.name: model.last_used_s + model.idle_s
        for model in models
        if model.stage is Stage.READY and not model.is_kept and model.idle_s is not None and not model.users
    }
    due = tuple(name for name, end_s in ends_s.items() if end_s <= now_s)
    return due, _earliest([end_s for end_s in ends_s.values() if end_s > now_s])


def _earliest(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
