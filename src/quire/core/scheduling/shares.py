"""Fair sharing of a bounded number of places, such as those of the queue, between tenants. Callers pass in the time.

    share       of a tenant: all places times the tenant's weight, divided by the weights of all tenants that sent a
                request within the last minute or hold a place; rounded down, at least one place
    refused     a request is refused if its tenant already holds its share (and at least 8 places), or no place is free
    displaced   if no place is free and the requesting tenant is below its share, its request takes the place of the
                newest request of the tenant furthest above its share
    promised    a request sent at the retry time of an earlier refusal is accepted regardless of shares and of free
                places, and cannot be displaced

The shares add up to the number of places. So if no place is free and one tenant is below its share, another is above:
a tenant below its share is never refused, and a request within its tenant's share is never displaced. (With more
tenants than places, each share is one place, and some tenants are refused.)

Places may be reserved for each of several kinds of requests (such as priority classes). While a kind stays within its
reserved places, the shares of other kinds are computed without these places and without the requests in them.
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
    num_reserved: int = 0
    """Places reserved for each kind, so that a flood of one kind cannot exclude the others."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> weight; all other tenants have weight 1."""
    state: str = "waiting"
    """The state of a request with a place, for messages."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The request is accepted."""

    has_reservation: bool = False
    displaced_name: str | None = None
    """The request to displace, which gives up its place; None if a place was free."""


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
    """Whether a recently refused tenant would be accepted now; for processes that refuse requests before the queue."""

    tenant: str
    kind: str
    num_room: int
    """How many requests of the tenant would be accepted if it sent them now."""
    refusal: Denied
    """The refusal of further requests."""


RESERVATION_VALID_S = 60.0
"""Seconds for which a retry reservation stays valid after its retry time."""


@dataclass(frozen=True, slots=True)
class RetryReservation:
    """The retry times of a tenant's first and latest reservation. Both expire `RESERVATION_VALID_S` after the later."""

    first_due_s: float
    last_due_s: float | None = None

    @property
    def until_s(self) -> float:
        """The time after which both reservations expire."""
        return max(self.first_due_s, self.last_due_s or 0.0) + RESERVATION_VALID_S


class RetryReservations:
    """The retry times sent to refused tenants: at most two per tenant, the first unused one and the latest.

    A retry time is a reservation: a tenant that waits until then is accepted. Each reservation is valid for one
    request. A later refusal does not postpone the first reservation, because the client may not have received that
    refusal before it sent its next request. A client that retries without waiting is accepted as often as a client
    that waits: once per retry time.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, RetryReservation] = OrderedDict()

    def redeem(self, tenant: str, now_s: float) -> bool:
        """Return whether the tenant has a valid reservation, and use it up."""
        reservation = self._by_tenant.get(tenant)
        if reservation is None or now_s < reservation.first_due_s:
            return False
        if reservation.last_due_s is None:
            del self._by_tenant[tenant]
        else:
            self._by_tenant[tenant] = RetryReservation(reservation.last_due_s)
        return now_s <= reservation.until_s

    def reserve(self, tenant: str, now_s: float, retry_after_s: float) -> None:
        """Record that a refused tenant received this retry delay."""
        due_s, reservation = now_s + retry_after_s, self._by_tenant.get(tenant)
        if reservation is None or reservation.until_s < now_s:
            self._by_tenant[tenant] = RetryReservation(due_s)
        else:
            self._by_tenant[tenant] = RetryReservation(min(reservation.first_due_s, due_s), due_s)
        self._by_tenant.move_to_end(tenant)
        while next(iter(self._by_tenant.values())).until_s < now_s:
            self._by_tenant.popitem(last=False)


MIN_SHARE = 8
"""A tenant with fewer places than this is not refused while places are free."""
ACTIVE_WITHIN_S = 60.0
"""A tenant that sent a request within this time takes part in the sharing."""
MAX_RETRY_S = 60
UNKNOWN_RETRY_S = 10
"""Retry delay before the first departure, when the rate of freed places is not known yet."""
MAX_REFUSALS = 64
"""Number of recent refusals to remember, for hints."""
NUM_DEPARTURES = 64
"""Number of recent departures (requests that gave up their place) from which the rate of freed places is measured."""


class TenantUsage:
    """The places and promised requests of one tenant."""

    __slots__ = ("places", "promised_s")

    def __init__(self, kinds: Collection[str]) -> None:
        self.places: dict[str, OrderedDict[str, int | None]] = {kind: OrderedDict() for kind in kinds}
        """Kind -> request -> serial number, the newest last. Settled requests (see `Shares.settle`) have no number and
        come first."""
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
        newest = [next(reversed(self.places[kind].items())) for kind in kinds if self.places[kind]]
        displaceable = [(serial, name) for name, serial in newest if serial is not None]
        return max(displaceable)[1] if displaceable else None


@dataclass(frozen=True, slots=True)
class ShareLimit:
    """The places that are available to a kind of requests at present, and the kinds that share them."""

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
        """Request -> (tenant, kind); the kind is None if the request was accepted by reservation."""
        self.num_promised = 0
        """Number of requests accepted by reservation, beyond all limits."""
        self._departures_s: deque[float] = deque(maxlen=NUM_DEPARTURES)
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
        """Record that a tenant sent a request, and decide whether it is accepted. If so, the caller must call `take` or
        `take_promised` before any other operation. `has_reservation`: sent at the retry time of a refusal.
        """
        self.advance(now_s)
        self._count_tenant(tenant)
        self._last_request_s[tenant] = self._now_s
        self._last_request_s.move_to_end(tenant)
        decision = self.judge(tenant, kind, has_reservation=has_reservation)
        if isinstance(decision, Denied):
            self.refused[tenant, kind] = decision
            self.refused.move_to_end((tenant, kind))
            if len(self.refused) > MAX_REFUSALS:
                self.refused.popitem(last=False)
        return decision

    def judge(self, tenant: str, kind: str, *, has_reservation: bool = False) -> Granted | Denied:
        """Return the decision on a request that arrives now. Changes nothing."""
        if has_reservation and self.num_promised < self._max_promised:
            return RESERVED
        share_limit = self._share_limit(tenant, kind)
        num_held, share = self._num_held(tenant, share_limit), self._share(tenant, share_limit)
        has_free_place = share_limit.num_taken < share_limit.limit
        if num_held < max(MIN_SHARE, share) and has_free_place:
            return FREE
        if num_held < share and (name := self._request_to_displace(share_limit)) is not None:
            return Granted(displaced_name=name)
        is_alone = self._num_sharing == self._is_sharing(tenant)
        retry_after_s = self.retry_after_s(tenant, kind)
        if is_alone or num_held < share:
            num_outside = self.num_taken - share_limit.num_taken
            return Denied(tenant, self.num_taken, share_limit.limit + num_outside, retry_after_s, None)
        limit = max(MIN_SHARE, share) if has_free_place else share
        return Denied(tenant, num_held, limit, retry_after_s, self.bounds.state)

    def update_hints(self) -> tuple[AdmissionHint, ...]:
        """Return hints for recently refused tenants. Tenants that no longer take part in the sharing are dropped."""
        for tenant, kind in [key for key in self.refused if not self._is_sharing(key[0])]:
            del self.refused[tenant, kind]
        return tuple(self._update_hint(tenant, kind) for tenant, kind in self.refused)

    def _update_hint(self, tenant: str, kind: str) -> AdmissionHint:
        decision = self.judge(tenant, kind)
        if isinstance(decision, Denied):
            self.refused[tenant, kind] = decision
            return AdmissionHint(tenant, kind, 0, decision)
        share_limit = self._share_limit(tenant, kind)
        num_held, share = self._num_held(tenant, share_limit), self._share(tenant, share_limit)
        num_free = min(share_limit.limit - share_limit.num_taken, max(MIN_SHARE, share) - num_held)
        return AdmissionHint(tenant, kind, max(num_free, share - num_held), self.refused[tenant, kind])

    def retry_after_s(self, tenant: str, kind: str) -> int:
        """Estimate the whole seconds until a place is free for the tenant, from the rate of recent departures.

        If the tenant has requests that were accepted by reservation, the delay is at least the age of the oldest (up to
        `MAX_RETRY_S`). So a tenant that always retries on time gets fewer and fewer requests beyond its share.
        """
        share_limit = self._share_limit(tenant, kind)
        promised_s = self.holders[tenant].promised_s if tenant in self.holders else {}
        oldest_s = self._now_s - next(iter(promised_s.values())) if promised_s else 0.0
        if not self._departures_s:
            return ceil(min(MAX_RETRY_S, max(UNKNOWN_RETRY_S, oldest_s)))
        departure_s = max(0.0, self._now_s - self._departures_s[0]) / len(self._departures_s)
        num_above = self._num_held(tenant, share_limit) + 1 - max(MIN_SHARE, self._share(tenant, share_limit))
        tenant_s = num_above * departure_s * share_limit.weight / self._weight_of(tenant)
        all_s = (share_limit.num_taken + 1 - share_limit.limit) * departure_s
        return ceil(min(MAX_RETRY_S, max(1, tenant_s, all_s, oldest_s)))

    def share_of(self, tenant: str, kind: str) -> int:
        """Return the tenant's share of the places available to this kind."""
        return self._share(tenant, self._share_limit(tenant, kind))

    def _share_limit(self, tenant: str, kind: str) -> ShareLimit:
        """Return the places available to a kind: all but those of other kinds that are within their reserved places."""
        kinds = tuple(k for k in self.bounds.kinds if k == kind or self._num_taken[k] > self.bounds.num_reserved)
        limit = self.bounds.max_places - self.bounds.num_reserved * (len(self.bounds.kinds) - len(kinds))
        weight = self.sharing_weight + (0.0 if self._is_sharing(tenant) else self._weight_of(tenant))
        return ShareLimit(kinds, limit, sum(self._num_taken[k] for k in kinds), weight)

    def _share(self, tenant: str, share_limit: ShareLimit) -> int:
        return max(1, floor(share_limit.limit * self._weight_of(tenant) / share_limit.weight))

    def _num_held(self, tenant: str, share_limit: ShareLimit) -> int:
        holder = self.holders.get(tenant)
        return 0 if holder is None else holder.num_in(share_limit.kinds)

    def _request_to_displace(self, share_limit: ShareLimit) -> str | None:
        """Return the newest displaceable request of the tenant furthest above its share; None if no tenant is above.

        This visits all tenants with places, so it runs only for requests of a tenant below its share.
        """
        displaced, max_above = None, 0
        for tenant, holder in self.holders.items():
            num_above = holder.num_in(share_limit.kinds) - self._share(tenant, share_limit)
            if num_above > max_above and (newest := holder.newest_in(share_limit.kinds)) is not None:
                displaced, max_above = newest, num_above
        return displaced

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
        """Settle a request: from now on it cannot be displaced."""
        tenant, kind = self.owners[name]
        if kind is not None:
            places = self.holders[tenant].places[kind]
            places[name] = None
            places.move_to_end(name, last=False)

    def give_back(self, name: str) -> None:
        """Free the place of a request."""
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

    def record_departure(self, now_s: float) -> None:
        """Record that a request gave up its place without being displaced; retry delays are estimated from these."""
        self.advance(now_s)
        self._departures_s.append(self._now_s)

    def advance(self, now_s: float) -> None:
        """Advance the time. Tenants without a place and without a request in the last minute are forgotten."""
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
            self._count_tenant(tenant)
            holder = self.holders[tenant] = TenantUsage(self.bounds.kinds)
        return holder

    def _weight_of(self, tenant: str) -> float:
        return self.bounds.weights.get(tenant, 1.0)

    def _is_sharing(self, tenant: str) -> bool:
        return tenant in self._last_request_s or tenant in self.holders

    def _count_tenant(self, tenant: str) -> None:
        """Count a tenant as taking part in the sharing; call this before it is added to any table."""
        if not self._is_sharing(tenant):
            self._num_sharing += 1
            self.sharing_weight += self._weight_of(tenant)

    def _forget(self, tenant: str) -> None:
        """Stop counting a tenant that is in no table any more; call this after removing it from a table."""
        if not self._is_sharing(tenant):
            self._num_sharing -= 1
            # Floating-point sums drift, so the weight is reset to 0 when no tenant is left.
            self.sharing_weight = self.sharing_weight - self._weight_of(tenant) if self._num_sharing else 0.0
