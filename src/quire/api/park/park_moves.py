"""Which models are to be loaded now, and which are to leave: a pure function of what is in the memory and who waits.

    away ──load──► loading ──► here ──leave──► leaving ──► away
                                ▲                │
                                └──────stay──────┘   nobody needs the room any more

One who waits is served before all who began to wait later, so no model waits without end. A model leaves if it was used
longest ago among those that nobody uses; if all are used, the one that was begun to be used longest ago takes no new
requests, and leaves with its last answer. Whoever has come stays for a while: two models that do not fit together would
otherwise do nothing but come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """Where a model is."""

    AWAY = "unloaded"
    LOADING = "loading"
    HERE = "ready"
    LEAVING = "unloading"


@dataclass(frozen=True, slots=True)
class Parked:
    """What is known of one model."""

    name: str
    needed_bytes: int
    """What it takes of the memory from its loading to its end."""
    stage: Stage = Stage.AWAY
    is_kept: bool = False
    """It is loaded at the start, and never leaves."""
    idle_s: float | None = None
    """It leaves when nobody has used it for so long."""
    num_users: int = 0
    """Requests that it answers."""
    waiting_since_s: float | None = None
    """When the first of those who wait for it came; None: nobody waits."""
    here_since_s: float = 0.0
    last_used_s: float = 0.0
    must_leave: bool = False
    """Somebody wants it away, whoever needs the room."""

    @property
    def is_wanted(self) -> bool:
        """It is away, and should not be."""
        return self.stage is Stage.AWAY and (self.is_kept or self.waiting_since_s is not None)


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be done now."""

    load: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    """Take no new requests, and end with the last answer."""
    stay: tuple[str, ...] = ()
    """They were to leave, and need not."""
    look_again_s: float | None = None
    """When time alone changes this."""


def next_moves(models: Sequence[Parked], memory_bytes: int, min_stay_s: float, now_s: float) -> Moves:
    """What to do. What was told before and is not done yet is not told again."""
    free_bytes = memory_bytes - sum(one.needed_bytes for one in models if one.stage is not Stage.AWAY)
    coming_bytes = sum(one.needed_bytes for one in models if one.stage is Stage.LEAVING)
    load: list[str] = []
    for wanted in _in_order(models):
        if wanted.needed_bytes <= free_bytes:
            free_bytes -= wanted.needed_bytes
            load.append(wanted.name)
        elif not in_its_way(wanted, models, memory_bytes):
            # Whoever waits behind it waits too: room that is made for it is not for them.
            missing_bytes = wanted.needed_bytes - free_bytes - coming_bytes
            leave, look_again_s = _make_room(models, missing_bytes, min_stay_s, now_s)
            return Moves(tuple(load), leave, (), look_again_s)
    is_free_to = [one for one in models if one.stage is Stage.LEAVING and not one.must_leave]
    stay = tuple(one.name for one in is_free_to if one.num_users)
    leave, look_again_s = _idle(models, now_s)
    return Moves(tuple(load), leave, stay, look_again_s)


def _in_order(models: Sequence[Parked]) -> list[Parked]:
    """Those that are kept, then whoever waits longest."""
    wanted = [one for one in models if one.is_wanted]
    return sorted(wanted, key=lambda one: (not one.is_kept, one.waiting_since_s or 0.0))


def in_its_way(wanted: Parked, models: Sequence[Parked], memory_bytes: int) -> list[str]:
    """Kept models beside which it has no room, and itself if it has none at all; empty if it can be loaded."""
    if wanted.needed_bytes > memory_bytes:
        return [wanted.name]
    kept = [one for one in models if one.is_kept and one.name != wanted.name]
    is_too_much = wanted.needed_bytes + sum(one.needed_bytes for one in kept) > memory_bytes
    return [one.name for one in kept] if is_too_much else []


def _make_room(
    models: Sequence[Parked], missing_bytes: int, min_stay_s: float, now_s: float
) -> tuple[tuple[str, ...], float | None]:
    """Who leaves, if that is enough; else when to look again. Nobody leaves in vain."""
    here = [one for one in models if one.stage is Stage.HERE and not one.is_kept]
    leave: list[str] = []
    for one in sorted(here, key=lambda one: (one.num_users > 0, one.last_used_s)):
        if missing_bytes > 0 and one.here_since_s + min_stay_s <= now_s:
            missing_bytes -= one.needed_bytes
            leave.append(one.name)
    if missing_bytes <= 0:
        return tuple(leave), None
    later = [one.here_since_s + min_stay_s for one in here if one.here_since_s + min_stay_s > now_s]
    return (), min(later, default=None)


def _idle(models: Sequence[Parked], now_s: float) -> tuple[tuple[str, ...], float | None]:
    """Who leaves because nobody used it for long, and when the next one will."""
    ends = {
        one.name: one.last_used_s + one.idle_s
        for one in models
        if one.stage is Stage.HERE and not one.is_kept and one.idle_s is not None and not one.num_users
    }
    return (
        tuple(name for name, end_s in ends.items() if end_s <= now_s),
        min((end_s for end_s in ends.values() if end_s > now_s), default=None),
    )
