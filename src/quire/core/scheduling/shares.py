"""Fair sharing of a bounded number of places, such as those of the queue, between tenants. Callers pass in the time.

    share       of a tenant: all places times the tenant's weight, divided by the weights of all tenants that sent a
                request within the last minute or hold a place; rounded down, at least one place
    refused     a request of a tenant that already holds its share (and at least 8 places), or when no place is free
    displaced   if no place is free and the requesting tenant is below its share, it takes the place of the newest
                request of the tenant furthest above its share
    promised    a tenant that retries at the time it received with a refusal is accepted regardless of its share and of
                free places, and cannot be displaced

The shares add up to the number of places. So if no place is free and one tenant is below its share, another is above:
a tenant below its share is never refused, and a request within its tenant's share is never displaced. (With more
tenants than places, each share is one place, and some tenants are refused.)

A number of places may be reserved for each of several kinds of requests (such as priority classes). While a kind stays
within its reserved places, the other kinds are computed without it: without these places and without its requests.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, inf

import msgspec

from quire.errors import CapacityError, QueueFullError, TenantShareError

MIN_RESERVED = 256
"""Up to this many promised requests (see above) are accepted, or as many as there are places if that is more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The places to share, fixed at start."""

    max_places: int
    kinds: tuple[str, ...] = ("",)
    num_kept: int = 0
    """Places reserved for each kind, so that a flood of one kind cannot exclude the others."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> weight; all other tenants have weight 1."""
    state: str = "waiting"
    """The state of a request with a place, for messages."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The request is accepted."""

    has_reservation: bool = False
    gives_up: str | None = None
    """The request to displace; None if a place was free."""


FREE = Granted()
RESERVED = Granted(has_reservation=True)


@dataclass(frozen=True, slots=True)
class Denied:
    """The request is refused; `retry_after_s` is the delay before a retry."""

    tenant: str
    num_held: int
    limit: int
    retry_after_s: int
    state: str | None
    """If the tenant's share is used up, the state of its requests (`Bounds.state`); None: all places are in use."""

    @property
    def error(self) -> CapacityError:
        if self.state is None:
            return QueueFullError(self.num_held, self.limit, self.retry_after_s)
        return TenantShareError(self.tenant, self.num_held, self.limit, self.retry_after_s, self.state)


class AdmissionHint(msgspec.Struct, array_like=True):
    """How a recently refused tenant would be judged now, for other processes that reject requests before the queue."""

    tenant: str
    kind: str
    num_room: int
    """How many of the tenant's requests would be accepted, one after the other."""
    refusal: Denied
    """The refusal of further requests."""


KEPT_S = 60.0
"""How long a retry reservation stays valid after its time."""


@dataclass(frozen=True, slots=True)
class RetryReservation:
    """A tenant's first and latest reservation: the times from which they are valid, until a minute after the later."""

    first_due_s: float
    last_due_s: float | None = None

    @property
    def until_s(self) -> float:
        """The time after which both reservations expire."""
        return max(self.first_due_s, self.last_due_s or 0.0) + KEPT_S


class RetryReservations:
    """The retry times sent to refused tenants: at most two per tenant, the first unused one and the latest.

    A retry time is a reservation: a tenant that waits until then is accepted. Each reservation is valid for one
    request. A later refusal does not postpone the first reservation, because it is not known which refusals the client
    had received when it sent the next request; a client with the latest refusal uses the latest reservation. A client
    that keeps sending is accepted as often as one that waits: once per retry time.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, RetryReservation] = OrderedDict()

    def redeem(self, tenant: str, now_s: float) -> bool:
        """Return whether the tenant has a valid reservation, and use it up."""
        promise = self._by_tenant.get(tenant)
        if promise is None or now_s < promise.first_due_s:
            return False
        if promise.last_due_s is None:
            del self._by_tenant[tenant]
        else:
            self._by_tenant[tenant] = RetryReservation(promise.last_due_s)
        return now_s <= promise.until_s

    def reserve(self, tenant: str, now_s: float, retry_after_s: float) -> None:
        """Record that a refused tenant received this retry delay."""
        due_s, before = now_s + retry_after_s, self._by_tenant.get(tenant)
        if before is None or before.until_s < now_s:
            self._by_tenant[tenant] = RetryReservation(due_s)
        else:
            self._by_tenant[tenant] = RetryReservation(min(before.first_due_s, due_s), due_s)
        self._by_tenant.move_to_end(tenant)
        while next(iter(self._by_tenant.values())).until_s < now_s:
            self._by_tenant.popitem(last=False)


LEAST_SHARE = 8
"""A tenant with fewer places is not refused while places are free."""
ACTIVE_WITHIN_S = 60.0
"""A tenant that sent a request within this time takes part in the sharing."""
MAX_RETRY_S = 60
UNKNOWN_RETRY_S = 10
"""Retry delay as long as no request has left yet."""
MAX_VERDICTS = 64
"""Number of recent refusals to remember."""
NUM_REMEMBERED = 64
"""Number of recent departures from which the rate of freed places is measured."""


class TenantUsage:
    """The places and promised requests of one tenant."""

    __slots__ = ("places", "promised_s")

    def __init__(self, kinds: Collection[str]) -> None:
        self.places: dict[str, OrderedDict[str, int | None]] = {kind: OrderedDict() for kind in kinds}
        """Kind -> request -> serial number, the newest last. Settled requests, which cannot be displaced, have no
        number and come first."""
        self.promised_s: dict[str, float] = {}
        """Requests accepted by reservation -> arrival, oldest first."""

    @property
    def is_empty(self) -> bool:
        return not self.promised_s and not any(self.places.values())

    def num_in(self, kinds: Collection[str]) -> int:
        """Return the number of places of these kinds."""
        return sum(len(self.places[kind]) for kind in kinds)

    def newest_in(self, kinds: Collection[str]) -> str | None:
        """Return the newest request of these kinds; None if none can be displaced."""
        last = [next(reversed(self.places[kind].items())) for kind in kinds if self.places[kind]]
        numbered = [(serial, name) for name, serial in last if serial is not None]
        return max(numbered)[1] if numbered else None


@dataclass(frozen=True, slots=True)
class ShareLimit:
    """The places available to a kind at present, and the kinds that share them."""

    kinds: tuple[str, ...]
    limit: int
    num_taken: int
    weight: float
    """Sum of the weights of all tenants that share them, including the requesting one."""


class Shares:
    """Counts each tenant's places, and decides which requests are accepted."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._max_promised = max(bounds.max_places, MIN_RESERVED)
        """Limit on requests accepted by reservation."""
        self.holders: dict[str, TenantUsage] = {}
        self._last_request_s: OrderedDict[str, float] = OrderedDict()
        """Tenant -> time of its last request, for requests within the last minute; the latest last."""
        self._num_sharing = 0
        """Number of tenants that sent a request within the last minute or hold a place."""
        self.sharing_weight = 0.0
        """Sum of the weights of these tenants."""
        self._num_taken = dict.fromkeys(bounds.kinds, 0)
        self.owners: dict[str, tuple[str, str | None]] = {}
        """Request -> tenant and kind; the kind is None if the request was accepted by reservation."""
        self.num_promised = 0
        """Number of requests accepted by reservation, beyond all limits."""
        self._left_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self.refused: OrderedDict[tuple[str, str], Denied] = OrderedDict()
        """Tenant and kind -> latest refusal; the latest last."""
        self._serial = 0
        self._now_s = -inf

    def __contains__(self, name: str) -> bool:
        return name in self.owners

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_taken(self) -> int:
        """Number of places in use, without requests accepted by reservation."""
        return sum(self._num_taken.values())

    @property
    def tenants(self) -> set[str]:
        return self._last_request_s.keys() | self.holders.keys()

    # -- admission -----------------------------------------------------------------------------------------------------

    def request_place(self, tenant: str, kind: str, now_s: float, *, has_reservation: bool = False) -> Granted | Denied:
        """Record that a tenant sends a request, and decide whether it is accepted. If so, the caller must call `take`
        before any other operation. `has_reservation`: the tenant retries at the time it received with a refusal.
        """
        self.advance(now_s)
        self._count(tenant)
        self._last_request_s[tenant] = self._now_s
        self._last_request_s.move_to_end(tenant)
        room = self.judge(tenant, kind, has_reservation=has_reservation)
        if isinstance(room, Denied):
            self.refused[tenant, kind] = room
            self.refused.move_to_end((tenant, kind))
            if len(self.refused) > MAX_VERDICTS:
                self.refused.popitem(last=False)
        return room

    def judge(self, tenant: str, kind: str, *, has_reservation: bool = False) -> Granted | Denied:
        """Return the decision on a request that arrives now. Changes nothing."""
        if has_reservation and self.num_promised < self._max_promised:
            return RESERVED
        reach = self._reach(tenant, kind)
        num_held, share = self._num_held(tenant, reach), self._share(tenant, reach)
        is_free = reach.num_taken < reach.limit
        if num_held < max(LEAST_SHARE, share) and is_free:
            return FREE
        if num_held < share and (name := self._displaced(reach)) is not None:
            return Granted(gives_up=name)
        is_alone = self._num_sharing == self._is_sharing(tenant)
        retry_after_s = self.retry_after_s(tenant, kind)
        if is_alone or num_held < share:
            num_apart = self.num_taken - reach.num_taken
            return Denied(tenant, self.num_taken, reach.limit + num_apart, retry_after_s, None)
        limit = max(LEAST_SHARE, share) if is_free else share
        return Denied(tenant, num_held, limit, retry_after_s, self.bounds.state)

    def update_hints(self) -> tuple[AdmissionHint, ...]:
        """Judge the recently refused tenants again. Tenants that no longer take part in the sharing are dropped."""
        for tenant, kind in [one for one in self.refused if not self._is_sharing(one[0])]:
            del self.refused[tenant, kind]
        return tuple(self._update_hint(tenant, kind) for tenant, kind in self.refused)

    def _update_hint(self, tenant: str, kind: str) -> AdmissionHint:
        room = self.judge(tenant, kind)
        if isinstance(room, Denied):
            self.refused[tenant, kind] = room
            return AdmissionHint(tenant, kind, 0, room)
        reach = self._reach(tenant, kind)
        num_held, share = self._num_held(tenant, reach), self._share(tenant, reach)
        num_free = min(reach.limit - reach.num_taken, max(LEAST_SHARE, share) - num_held)
        return AdmissionHint(tenant, kind, max(num_free, share - num_held), self.refused[tenant, kind])

    def retry_after_s(self, tenant: str, kind: str) -> int:
        """Estimate the whole seconds until a place is free for the tenant, from the rate of recent departures.

        If the tenant has requests that were accepted by reservation, the delay is at least the age of the oldest (up to
        `MAX_RETRY_S`). So a tenant that always retries on time gets fewer and fewer requests beyond its share.
        """
        reach = self._reach(tenant, kind)
        promised_s = self.holders[tenant].promised_s if tenant in self.holders else {}
        oldest_s = self._now_s - next(iter(promised_s.values())) if promised_s else 0.0
        if not self._left_s:
            return ceil(min(MAX_RETRY_S, max(UNKNOWN_RETRY_S, oldest_s)))
        each_s = max(0.0, self._now_s - self._left_s[0]) / len(self._left_s)
        num_over = self._num_held(tenant, reach) + 1 - max(LEAST_SHARE, self._share(tenant, reach))
        own_s = num_over * each_s * reach.weight / self._weight_of(tenant)
        all_s = (reach.num_taken + 1 - reach.limit) * each_s
        return ceil(min(MAX_RETRY_S, max(1, own_s, all_s, oldest_s)))

    def share_of(self, tenant: str, kind: str) -> int:
        """Return the tenant's share of the places available to this kind."""
        return self._share(tenant, self._reach(tenant, kind))

    def _reach(self, tenant: str, kind: str) -> ShareLimit:
        """Return the places available to a kind: all, except those reserved for other kinds that do not need more."""
        kinds = tuple(one for one in self.bounds.kinds if one == kind or self._num_taken[one] > self.bounds.num_kept)
        limit = self.bounds.max_places - self.bounds.num_kept * (len(self.bounds.kinds) - len(kinds))
        weight = self.sharing_weight + (0.0 if self._is_sharing(tenant) else self._weight_of(tenant))
        return ShareLimit(kinds, limit, sum(self._num_taken[one] for one in kinds), weight)

    def _share(self, tenant: str, reach: ShareLimit) -> int:
        return max(1, floor(reach.limit * self._weight_of(tenant) / reach.weight))

    def _num_held(self, tenant: str, reach: ShareLimit) -> int:
        holder = self.holders.get(tenant)
        return 0 if holder is None else holder.num_in(reach.kinds)

    def _displaced(self, reach: ShareLimit) -> str | None:
        """Return the newest displaceable request of the tenant furthest above its share; None if no tenant is above.

        This visits all tenants with places, so it runs only for requests of a tenant below its share.
        """
        furthest, most = None, 0
        for tenant, holder in self.holders.items():
            num_above = holder.num_in(reach.kinds) - self._share(tenant, reach)
            if num_above > most and (newest := holder.newest_in(reach.kinds)) is not None:
                furthest, most = newest, num_above
        return furthest

    # -- places --------------------------------------------------------------------------------------------------------

    def take(self, name: str, tenant: str, kind: str) -> None:
        """Take a place of this kind, even if none is free: a request accepted before a crash is not judged again."""
        self._serial += 1
        self._holder(tenant).places[kind][name] = self._serial
        self.owners[name] = (tenant, kind)
        self._num_taken[kind] += 1

    def take_promised(self, name: str, tenant: str, now_s: float) -> None:
        """Add a request that was accepted by reservation, beyond all limits."""
        self.advance(now_s)
        self._holder(tenant).promised_s[name] = self._now_s
        self.owners[name] = (tenant, None)
        self.num_promised += 1

    def settle(self, name: str) -> None:
        """Settle a request: it can no longer be displaced."""
        tenant, kind = self.owners[name]
        if kind is not None:
            places = self.holders[tenant].places[kind]
            places[name] = None
            places.move_to_end(name, last=False)

    def give_back(self, name: str) -> None:
        """Free the place of a request that leaves."""
        tenant, kind = self.owners.pop(name)
        holder = self.holders[tenant]
        if kind is None:
            del holder.promised_s[name]
            self.num_promised -= 1
        else:
            del holder.places[kind][name]
            self._num_taken[kind] -= 1
        if holder.is_empty:
            del self.holders[tenant]
            self._forget(tenant)

    def left(self, now_s: float) -> None:
        """Record a regular departure, for the estimate of retry delays."""
        self.advance(now_s)
        self._left_s.append(self._now_s)

    def advance(self, now_s: float) -> None:
        """Advance the time; forget tenants that hold no place and sent no request for a minute."""
        self._now_s = max(self._now_s, now_s)
        while self._last_request_s:
            tenant, last_s = next(iter(self._last_request_s.items()))
            if last_s > self._now_s - ACTIVE_WITHIN_S:
                return
            del self._last_request_s[tenant]
            self._forget(tenant)

    def _holder(self, tenant: str) -> TenantUsage:
        holder = self.holders.get(tenant)
        if holder is None:
            self._count(tenant)
            holder = self.holders[tenant] = TenantUsage(self.bounds.kinds)
        return holder

    def _weight_of(self, tenant: str) -> float:
        return self.bounds.weights.get(tenant, 1.0)

    def _is_sharing(self, tenant: str) -> bool:
        return tenant in self._last_request_s or tenant in self.holders

    def _count(self, tenant: str) -> None:
        """Count a tenant as sharing; call this before it is added to any table."""
        if not self._is_sharing(tenant):
            self._num_sharing += 1
            self.sharing_weight += self._weight_of(tenant)

    def _forget(self, tenant: str) -> None:
        """Stop counting a tenant as sharing; call this after it was removed from a table."""
        if not self._is_sharing(tenant):
            self._num_sharing -= 1
            # Floating-point sums drift, so the weight is reset to 0 when no tenant is left.
            self.sharing_weight = self.sharing_weight - self._weight_of(tenant) if self._num_sharing else 0.0
