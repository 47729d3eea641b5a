"""Which model is to be loaded now, and which are to leave: a pure function of what is in memory and which tenants wait.

    away ──load──► loading ──► here ──leave──► leaving ──► away
                                ▲                │
                                └──────stay──────┘   no tenant needs the room any more

**Turns.** A model that is ready has a turn: until it ends the model serves every tenant, even if others wait for its
room. A tenant that waits is before all that began to wait later, and behind them again once a model was loaded for it:
tenants take turns, however many models one of them requests. A tenant may end a turn early that no other tenant has
used, if no answer runs: a few times a minute, so that two models of one tenant do not only come and go.

**Leaving.** Of models whose turn has ended, one without requests leaves first, then one that serves the waiting
tenant alone, then the one that was used longest ago. It takes no new requests. Its last answers hold it for a while,
but not against a request of their own tenant; then they are set aside, and wait like a request for their model. Those
that are set aside take no model from running answers of their tenant: the two would do nothing but change places.

**Loads.** A tenant causes a bounded number of loads a minute; one that has caused them is passed over until it may.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

OPERATOR = ""
"""Waits for models that the operator loads. It is the name of no tenant, and its loads are not counted."""
MAX_HELD_S = 60.0
"""How long the last answers of a leaving model hold it."""
LOADS_S = 60.0
MAX_LOADS = 4
"""Loads that one tenant may cause within so many seconds."""
MAX_EARLY = 3
"""A tenant that has caused fewer within them may end its own turn early."""

Loads = Mapping[str, tuple[float, ...]]
"""When the last loads of each tenant were begun: at most MAX_LOADS of them, in order."""


class Stage(Enum):
    """Where a model is."""

    AWAY = "unloaded"
    LOADING = "loading"
    HERE = "ready"
    LEAVING = "unloading"


@dataclass(frozen=True, slots=True)
class Wish:
    """A tenant waits for a model."""

    tenant: str
    since_s: float
    """When its oldest began to wait."""
    is_aside: bool = False
    """Only with answers that were set aside."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The state of one model."""

    name: str
    needed_bytes: int
    """What it takes of the memory from its loading to its end."""
    stage: Stage = Stage.AWAY
    is_kept: bool = False
    """It is loaded at the start, and never leaves."""
    idle_s: float | None = None
    """It leaves when no tenant has used it for so long."""
    users: frozenset[str] = frozenset()
    """Tenants that it serves."""
    served: frozenset[str] = frozenset()
    """Tenants that have used it since it was ready."""
    wishes: tuple[Wish, ...] = ()
    """Of each tenant that waits for it."""
    turn_ends_s: float = 0.0
    leaving_since_s: float = 0.0
    last_used_s: float = 0.0
    must_leave: bool = False
    """The operator unloads it, or it is broken, whether or not its room is needed."""
    is_ending: bool = False
    """Its answers are being set aside: it cannot stay."""

    @property
    def is_wanted(self) -> bool:
        """It is away, and should not be."""
        return self.stage is Stage.AWAY and (self.is_kept or bool(self.wishes))


@dataclass(frozen=True, slots=True)
class Load:
    """A model to be loaded, and the tenant that causes it."""

    name: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be done now. After a load or a leave there may be more: the caller calls again at once."""

    load: Load | None = None
    leave: tuple[str, ...] = ()
    """Take no new requests, and end with the last answer."""
    set_aside: tuple[str, ...] = ()
    """They leave, and their answers have held them long enough."""
    stay: tuple[str, ...] = ()
    """They were to leave, and need not."""
    check_again_s: float | None = None
    """When time alone changes this."""


@dataclass(frozen=True, slots=True)
class _Want:
    """A model that is to be loaded, for the tenant that is first among those that wait for it."""

    model: Parked
    wish: Wish
    since_s: float
    """Since when it is this tenant's turn to be next."""

    @property
    def own(self) -> frozenset[str]:
        """The tenant whose running answers do not hold a model against it."""
        return frozenset() if self.wish.is_aside else frozenset({self.wish.tenant})


def next_moves(models: Sequence[Parked], memory_bytes: int, loads: Loads, now_s: float) -> Moves:
    """What to do now. Earlier decisions that are still under way are not repeated."""
    free_bytes = memory_bytes - sum(one.needed_bytes for one in models if one.stage is not Stage.AWAY)
    wants, allowed_s = _in_order(models, loads, now_s)
    first = next((one for one in wants if not in_its_way(one.model, models, memory_bytes)), None)
    if first is None:
        leave, idle_s = _idle(models, now_s)
        return Moves(leave=leave, stay=_staying(models), check_again_s=_soonest([idle_s, allowed_s]))
    if first.model.needed_bytes <= free_bytes:
        return Moves(load=Load(first.model.name, first.wish.tenant))
    # Other tenants wait behind it: room that is made for it is not for them.
    coming_bytes = sum(one.needed_bytes for one in models if one.stage is Stage.LEAVING)
    leave, turn_s = _make_room(models, first, first.model.needed_bytes - free_bytes - coming_bytes, loads, now_s)
    set_aside, held_s = _held(models, first.own, now_s)
    return Moves(leave=leave, set_aside=set_aside, check_again_s=_soonest([turn_s, held_s, allowed_s]))


def in_its_way(wanted: Parked, models: Sequence[Parked], memory_bytes: int) -> list[str]:
    """Kept models beside which it has no room, and itself if it has none at all; empty if it can be loaded."""
    if wanted.needed_bytes > memory_bytes:
        return [wanted.name]
    kept = [one for one in models if one.is_kept and one.name != wanted.name]
    is_too_much = wanted.needed_bytes + sum(one.needed_bytes for one in kept) > memory_bytes
    return [one.name for one in kept] if is_too_much else []


def may_load_s(tenant: str, loads: Loads, now_s: float, num_planned: int = 0) -> float:
    """How long until a tenant may cause a load, behind as many that it waits for already; 0: now."""
    recent = _recent(tenant, loads, now_s)
    num_over = len(recent) + num_planned - MAX_LOADS
    if tenant == OPERATOR or num_over < 0:
        return 0.0
    return LOADS_S if num_over >= len(recent) else recent[num_over] + LOADS_S - now_s


def _recent(tenant: str, loads: Loads, now_s: float) -> list[float]:
    return [begun_s for begun_s in loads.get(tenant, ()) if begun_s + LOADS_S > now_s]


def _in_order(models: Sequence[Parked], loads: Loads, now_s: float) -> tuple[list[_Want], float | None]:
    """Those that are kept, then by the tenants' turns; and when a tenant that is passed over may cause a load again."""
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
    """Which models leave, if that is enough; else when to check again. None leaves in vain."""
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
    """When it may leave for this tenant: a turn that no other tenant uses is the tenant's own, and may end early."""
    is_own = one.served == {tenant} and len(_recent(tenant, loads, now_s)) < MAX_EARLY
    return now_s if not one.users and (is_own or not one.served) else one.turn_ends_s


def _held(models: Sequence[Parked], own: frozenset[str], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Which models that leave are held no longer by their answers, and when the next one is."""
    held = [one for one in models if one.stage is Stage.LEAVING and one.users and not one.is_ending]
    over = [one.name for one in held if one.users <= own or one.leaving_since_s + MAX_HELD_S <= now_s]
    later = [one.leaving_since_s + MAX_HELD_S for one in held if one.name not in over]
    return tuple(over), _soonest(later)


def _staying(models: Sequence[Parked]) -> tuple[str, ...]:
    """Models that were to leave for a wish that is no more."""
    leaving = [one for one in models if one.stage is Stage.LEAVING and not one.must_leave and not one.is_ending]
    return tuple(one.name for one in leaving if one.users)


def _idle(models: Sequence[Parked], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Which models leave because no tenant used them for long, and when the next one will."""
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
