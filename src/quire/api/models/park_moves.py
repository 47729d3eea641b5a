"""Decide which model to load now and which to unload: a pure function of the loaded models and the waiting tenants.

    unloaded ──load──► loading ──► ready ──leave──► unloading ──► unloaded
                                     ▲                  │
                                     └───────stay───────┘   no tenant needs the memory any more

**Turns.** A ready model has a turn: until its end the model serves every tenant, even if tenants wait for its memory.
Waiting tenants are served in the order in which they began to wait, but a load puts its tenant at the end of the queue,
so tenants take turns however many models each requests. A tenant may end a turn early if no other tenant used the model
and no request runs. It can do so a few times per minute, so that two models of one tenant do not constantly alternate.

**Unloading.** Among models whose turn has ended, one without requests is unloaded first, then one that serves only the
waiting tenant, then the least recently used. An unloading model accepts no requests. Its running requests delay the
unloading for a bounded time, but not if they belong to the tenant that waits for the memory. Then they are suspended,
and wait like requests for their model. A tenant's suspended requests never unload a model with running requests of that
tenant, because the two models would only alternate.

**Loads.** The loads that a tenant may cause per minute are bounded; a tenant at the bound is skipped until it may load.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

OPERATOR = ""
"""The pseudo-tenant that waits for models that the operator loads. Its loads are not counted."""
MAX_HELD_S = 60.0
"""Maximum time for which running requests delay the unloading of their model."""
LOADS_S = 60.0
MAX_LOADS = 4
"""Maximum number of loads that one tenant may cause within LOADS_S."""
MAX_EARLY = 3
"""A tenant with fewer loads within LOADS_S may end its own turn early."""

Loads = Mapping[str, tuple[float, ...]]
"""Start times of each tenant's last loads, in order; at most MAX_LOADS per tenant."""


class Stage(Enum):
    """The state of a model."""

    AWAY = "unloaded"
    LOADING = "loading"
    HERE = "ready"
    LEAVING = "unloading"


@dataclass(frozen=True, slots=True)
class Wish:
    """A tenant waits for a model."""

    tenant: str
    since_s: float
    """When the tenant's oldest waiting request began to wait."""
    is_aside: bool = False
    """All of the tenant's waiting requests are suspended ones."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The state of one model."""

    name: str
    needed_bytes: int
    """Memory that the model takes from the start of loading to the end of unloading."""
    stage: Stage = Stage.AWAY
    is_kept: bool = False
    """The model is loaded at server start and never unloaded."""
    idle_s: float | None = None
    """The model is unloaded when no tenant has used it for this time; None: never."""
    users: frozenset[str] = frozenset()
    """Tenants with running requests on the model; if it is unloaded, with suspended ones."""
    served: frozenset[str] = frozenset()
    """Tenants that have used the model since its last load."""
    wishes: tuple[Wish, ...] = ()
    """One entry for each tenant that waits for the model."""
    turn_ends_s: float = 0.0
    leaving_since_s: float = 0.0
    last_used_s: float = 0.0
    must_leave: bool = False
    """Unload even if no memory is needed, because the operator requested it or the model is broken."""
    is_ending: bool = False
    """The running requests are being suspended, or none is left: the unloading can no longer be cancelled."""

    @property
    def is_wanted(self) -> bool:
        """The model is unloaded and should be loaded."""
        return self.stage is Stage.AWAY and (self.is_kept or bool(self.wishes))


@dataclass(frozen=True, slots=True)
class Load:
    """A model to load, and the tenant that causes it."""

    name: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Moves:
    """The moves to make now. After a load or an unload, the caller calls `next_moves` again at once."""

    load: Load | None = None
    leave: tuple[str, ...] = ()
    """Models to unload: they accept no new requests, and end after the last response."""
    set_aside: tuple[str, ...] = ()
    """Unloading models whose running requests are to be suspended."""
    stay: tuple[str, ...] = ()
    """Unloading models that can stay loaded, because their memory is no longer needed."""
    check_again_s: float | None = None
    """When to decide again even if nothing else changes; None: never."""


@dataclass(frozen=True, slots=True)
class _Want:
    """A model to load, and one tenant that waits for it."""

    model: Parked
    wish: Wish
    since_s: float
    """The sort key: when the tenant began to wait, or its last load, whichever is later."""

    @property
    def own(self) -> frozenset[str]:
        """The tenant whose running requests do not delay an unloading for this load; empty if only suspended requests
        wait."""
        return frozenset() if self.wish.is_aside else frozenset({self.wish.tenant})


def next_moves(models: Sequence[Parked], memory_bytes: int, loads: Loads, now_s: float) -> Moves:
    """Return the moves to make now. Moves that are still in progress are not repeated."""
    free_bytes = memory_bytes - sum(one.needed_bytes for one in models if one.stage is not Stage.AWAY)
    wants, allowed_s = _in_order(models, loads, now_s)
    first = next((one for one in wants if not in_its_way(one.model, models, memory_bytes)), None)
    if first is None:
        leave, idle_s = _idle(models, now_s)
        return Moves(leave=leave, stay=_staying(models), check_again_s=_soonest([idle_s, allowed_s]))
    if first.model.needed_bytes <= free_bytes:
        return Moves(load=Load(first.model.name, first.wish.tenant))
    # Other tenants wait after this one: they must not take the memory that is being freed for it.
    coming_bytes = sum(one.needed_bytes for one in models if one.stage is Stage.LEAVING)
    leave, turn_s = _make_room(models, first, first.model.needed_bytes - free_bytes - coming_bytes, loads, now_s)
    set_aside, held_s = _held(models, first.own, now_s)
    return Moves(leave=leave, set_aside=set_aside, check_again_s=_soonest([turn_s, held_s, allowed_s]))


def in_its_way(wanted: Parked, models: Sequence[Parked], memory_bytes: int) -> list[str]:
    """Return the always-loaded models that leave too little memory, or the wanted one if it never fits; empty: it
    fits."""
    if wanted.needed_bytes > memory_bytes:
        return [wanted.name]
    kept = [one for one in models if one.is_kept and one.name != wanted.name]
    is_too_much = wanted.needed_bytes + sum(one.needed_bytes for one in kept) > memory_bytes
    return [one.name for one in kept] if is_too_much else []


def may_load_s(tenant: str, loads: Loads, now_s: float, num_planned: int = 0) -> float:
    """Return the seconds until a tenant may cause a load in addition to `num_planned` others; 0: now."""
    recent = _recent(tenant, loads, now_s)
    num_over = len(recent) + num_planned - MAX_LOADS
    if tenant == OPERATOR or num_over < 0:
        return 0.0
    return LOADS_S if num_over >= len(recent) else recent[num_over] + LOADS_S - now_s


def _recent(tenant: str, loads: Loads, now_s: float) -> list[float]:
    return [begun_s for begun_s in loads.get(tenant, ()) if begun_s + LOADS_S > now_s]


def _in_order(models: Sequence[Parked], loads: Loads, now_s: float) -> tuple[list[_Want], float | None]:
    """Return the models to load, always-loaded ones first, then by turns; and when a skipped tenant may load again."""
    wants: list[_Want] = []
    allowed_s: list[float | None] = []
    for one in models:
        if not one.is_wanted:
            continue
        if one.is_kept:
            wants.append(_Want(one, Wish(OPERATOR, 0.0), float("-inf")))
            continue
        waits_s = {wish.tenant: may_load_s(wish.tenant, loads, now_s) for wish in one.wishes}
        allowed_s += [now_s + wait_s for wait_s in waits_s.values() if wait_s > 0]
        wants += [
            _Want(one, wish, max([wish.since_s, *loads.get(wish.tenant, ())[-1:]]))
            for wish in one.wishes
            if not waits_s[wish.tenant]
        ]
    return sorted(wants, key=lambda want: want.since_s), _soonest(allowed_s)


def _make_room(
    models: Sequence[Parked], want: _Want, missing_bytes: int, loads: Loads, now_s: float
) -> tuple[tuple[str, ...], float | None]:
    """Return the models to unload if they free enough memory; otherwise none, and when to check again."""
    here = [one for one in models if one.stage is Stage.HERE and not one.is_kept]
    ends_s = {one.name: _turn_ends_s(one, want.wish.tenant, loads, now_s) for one in here}
    leave: list[str] = []
    for one in sorted(here, key=lambda one: (bool(one.users - want.own), bool(one.users), one.last_used_s)):
        if missing_bytes > 0 and ends_s[one.name] <= now_s:
            missing_bytes -= one.needed_bytes
            leave.append(one.name)
    if missing_bytes <= 0:
        return tuple(leave), None
    return (), _soonest([end_s for end_s in ends_s.values() if end_s > now_s])


def _turn_ends_s(one: Parked, tenant: str, loads: Loads, now_s: float) -> float:
    """Return when a model may be unloaded for this tenant: early if no other tenant used it in its turn."""
    is_own = one.served == {tenant} and len(_recent(tenant, loads, now_s)) < MAX_EARLY
    return now_s if not one.users and (is_own or not one.served) else one.turn_ends_s


def _held(models: Sequence[Parked], own: frozenset[str], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Return the unloading models whose requests must be suspended now, and when the next ones must."""
    held = [one for one in models if one.stage is Stage.LEAVING and one.users and not one.is_ending]
    over = [one.name for one in held if one.users <= own or one.leaving_since_s + MAX_HELD_S <= now_s]
    later = [one.leaving_since_s + MAX_HELD_S for one in held if one.name not in over]
    return tuple(over), _soonest(later)


def _staying(models: Sequence[Parked]) -> tuple[str, ...]:
    """Return the models that were unloading for a tenant that no longer waits."""
    leaving = [one for one in models if one.stage is Stage.LEAVING and not one.must_leave and not one.is_ending]
    return tuple(one.name for one in leaving if one.users)


def _idle(models: Sequence[Parked], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Return the models to unload after their idle time, and when the next one is due."""
    ends = {
        one.name: one.last_used_s + one.idle_s
        for one in models
        if one.stage is Stage.HERE and not one.is_kept and one.idle_s is not None and not one.users
    }
    return (
        tuple(name for name, end_s in ends.items() if end_s <= now_s),
        _soonest([end_s for end_s in ends.values() if end_s > now_s]),
    )


def _soonest(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
