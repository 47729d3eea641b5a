"""How a bounded number of places is shared, and which request gives one up. Pure: names and counts, time handed in.

    share       of a tenant: the places times its weight, over the weights of all that sent a request within the last
                minute or hold a place now; whole places, at least one
    refused     a tenant that holds its share already, and at least 8 places; and every one when all are taken, but
    displaced   when all are taken, a tenant below its share takes the place of the newest of the tenant furthest above
                its own
    promised    a tenant that retries at the time it was sent: it is let in beyond share and bound, and its place is
                never taken

Shares add up to the places. So when all are taken and one tenant is below its share, another is above its own: a
tenant below its share is never turned away, and what waits within its tenant's share is never displaced. (With more
tenants than places a share is one place, and then some are turned away.)

A number of places may be kept for each of several kinds of requests. Then a kind that has not used up what is kept for
it is left out of all this for the others: neither its places nor what it holds are theirs to count.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, inf

import msgspec

from quire.core.request import PriorityClass
from quire.errors import CapacityError, QueueFullError, TenantShareError

CLASS_RESERVE = 0.1
"""Share of a queue that is kept for each class."""
MIN_RESERVED = 256
"""So many may be here beyond the bound by promise, however few places there are."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is shared, fixed at start."""

    max_places: int
    kinds: tuple[str, ...] = ("",)
    num_kept: int = 0
    """Places kept for each kind, so that a flood of one cannot shut out the others."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants by name; all others have weight 1."""
    state: str = "waiting"
    """What a request with a place is, in a sentence."""

    @staticmethod
    def of_queue(
        max_requests: int, class_reserve: float = CLASS_RESERVE, weights: Mapping[str, float] | None = None
    ) -> "Bounds":
        """The places of a queue of requests, some of them kept for each class."""
        kinds = tuple(one.value for one in PriorityClass)
        return Bounds(max_requests, kinds, int(max_requests * class_reserve), weights or {})

    @property
    def max_promised(self) -> int:
        """How many may be here beyond the bound, because they were promised a place at this time."""
        return max(self.max_places, MIN_RESERVED)


@dataclass(frozen=True, slots=True)
class Granted:
    """There is a place."""

    has_reservation: bool = False
    gives_up: str | None = None
    """The request that held it; None if the place was free."""


FREE = Granted()
RESERVED = Granted(has_reservation=True)


@dataclass(frozen=True, slots=True)
class Denied:
    """There is none, and when to retry."""

    tenant: str
    num_held: int
    limit: int
    retry_after_s: int
    state: str | None
    """What those of its share are that the tenant has used up; None: all places are taken, and none is given up."""

    @property
    def error(self) -> CapacityError:
        if self.state is None:
            return QueueFullError(self.num_held, self.limit, self.retry_after_s)
        return TenantShareError(self.tenant, self.num_held, self.limit, self.retry_after_s, self.state)


class AdmissionHint(msgspec.Struct, array_like=True):
    """What a tenant that was refused lately would get now, for the processes in front of the queue."""

    tenant: str
    kind: str
    num_room: int
    """So many of its requests would be let in, one after the other."""
    refusal: Denied
    """What those beyond get."""


KEPT_S = 60.0
"""How long after its time a promise is still good."""


@dataclass(frozen=True, slots=True)
class RetryReservation:
    """From when the first is good, and from when the last that was made since; both until a minute after the last."""

    first_due_s: float
    last_due_s: float | None = None

    @property
    def until_s(self) -> float:
        """From when on it is forgotten."""
        return max(self.first_due_s, self.last_due_s or 0.0) + KEPT_S


class RetryReservations:
    """When tenants were sent to retry: two times for each at most, the latest last.

    A time that is sent is a promise: a tenant that waits for it is let in. Each is good for one request: the first that
    is not used up, and the last. A refusal does not put off the first, because nothing here records which refusals a
    client had received when it sent the next request; a client that received the last has the last. A client that never
    stops sending is let in as often as one that waits: once in the time it is sent.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, RetryReservation] = OrderedDict()

    def redeem(self, tenant: str, now_s: float) -> bool:
        """Whether the tenant comes at a time it was sent, which is then used up."""
        promise = self._by_tenant.get(tenant)
        if promise is None or now_s < promise.first_due_s:
            return False
        if promise.last_due_s is None:
            del self._by_tenant[tenant]
        else:
            self._by_tenant[tenant] = RetryReservation(promise.last_due_s)
        return now_s <= promise.until_s

    def reserve(self, tenant: str, now_s: float, retry_after_s: float) -> None:
        """The tenant is refused and sent when to retry."""
        due_s, before = now_s + retry_after_s, self._by_tenant.get(tenant)
        if before is None or before.until_s < now_s:
            self._by_tenant[tenant] = RetryReservation(due_s)
        else:
            self._by_tenant[tenant] = RetryReservation(min(before.first_due_s, due_s), due_s)
        self._by_tenant.move_to_end(tenant)
        while next(iter(self._by_tenant.values())).until_s < now_s:
            self._by_tenant.popitem(last=False)


LEAST_SHARE = 8
"""A tenant that holds fewer is not refused while there are places left."""
ACTIVE_WITHIN_S = 60.0
"""A tenant that sent a request within this time counts among those that share."""
MAX_RETRY_S = 60
UNKNOWN_RETRY_S = 10
"""The time to retry while nothing has left yet."""
MAX_VERDICTS = 64
"""How many that were refused lately are kept."""
NUM_REMEMBERED = 64
"""How many of the last to leave measure how fast places come free."""


class TenantUsage:
    """A tenant that holds places."""

    __slots__ = ("places", "promised_s")

    def __init__(self, kinds: Collection[str]) -> None:
        self.places: dict[str, OrderedDict[str, int | None]] = {kind: OrderedDict() for kind in kinds}
        """Of each kind: requests that hold one and when they came, as a serial number, the newest last; before them
        those without a number, which are not displaced any more."""
        self.promised_s: dict[str, float] = {}
        """Requests that came at a promised time, and since when they are here; the oldest first."""

    @property
    def is_empty(self) -> bool:
        return not self.promised_s and not any(self.places.values())

    def num_in(self, kinds: Collection[str]) -> int:
        """Places of these kinds."""
        return sum(len(self.places[kind]) for kind in kinds)

    def newest_in(self, kinds: Collection[str]) -> str | None:
        """The request that came last, of these kinds; None if none could be displaced."""
        last = [next(reversed(self.places[kind].items())) for kind in kinds if self.places[kind]]
        numbered = [(serial, name) for name, serial in last if serial is not None]
        return max(numbered)[1] if numbered else None


@dataclass(frozen=True, slots=True)
class ShareLimit:
    """The places a kind may take part in, as they are now."""

    kinds: tuple[str, ...]
    limit: int
    num_taken: int
    weight: float
    """Of all tenants that share them, the requesting one among them."""


class Shares:
    """Counts what each tenant holds, and judges what may come in."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._max_promised = bounds.max_promised
        self.holders: dict[str, TenantUsage] = {}
        self._last_request_s: OrderedDict[str, float] = OrderedDict()
        """When each tenant sent its last request, within the last minute; the latest last."""
        self._num_sharing = 0
        """Tenants that sent a request within the last minute or hold something."""
        self.sharing_weight = 0.0
        """Of all of them."""
        self._num_taken = dict.fromkeys(bounds.kinds, 0)
        self.owners: dict[str, tuple[str, str | None]] = {}
        """Tenant and kind of each request that is here; no kind: it was promised its place."""
        self._num_promised = 0
        self._left_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self.refused: OrderedDict[tuple[str, str], Denied] = OrderedDict()
        """Tenants and kinds that were refused lately, and what they got; the latest last."""
        self._serial = 0
        self._now_s = -inf

    def __contains__(self, name: str) -> bool:
        return name in self.owners

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def num_taken(self) -> int:
        """Places taken; those that were promised stand beside them."""
        return sum(self._num_taken.values())

    @property
    def num_promised(self) -> int:
        """Requests that are here beyond all bounds because they were promised a place."""
        return self._num_promised

    @property
    def tenants(self) -> set[str]:
        return self._last_request_s.keys() | self.holders.keys()

    # -- admission -----------------------------------------------------------------------------------------------------

    def request_place(self, tenant: str, kind: str, now_s: float, *, has_reservation: bool = False) -> Granted | Denied:
        """Note that a tenant sends a request, and judge. The place is taken by `take` with nothing in between.

        `has_reservation`: it was promised a place at this time.
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
        """What a request that came now would get. Changes nothing."""
        if has_reservation and self._num_promised < self._max_promised:
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
        """Judge again the tenants that were refused lately: what they would get now. One that is gone is forgotten."""
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
        """Whole seconds after which a place should be there, by how fast requests have left lately.

        Not before a place that was promised to the tenant has been of use: then at least as long as that one has been
        here already, so that one that only ever comes back on time gets ever fewer beyond its share.
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
        """How many places the tenant may hold of those this kind may take part in."""
        return self._share(tenant, self._reach(tenant, kind))

    def _reach(self, tenant: str, kind: str) -> ShareLimit:
        """A kind that has not used up what is kept for it has all of that, and nothing else, to itself."""
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
        """The newest of the tenant furthest above its share, of those that could go; None if none is above.

        Visits every tenant that holds something, which is not done for a tenant at its share.
        """
        furthest, most = None, 0
        for tenant, holder in self.holders.items():
            num_above = holder.num_in(reach.kinds) - self._share(tenant, reach)
            if num_above > most and (newest := holder.newest_in(reach.kinds)) is not None:
                furthest, most = newest, num_above
        return furthest

    # -- what is held --------------------------------------------------------------------------------------------------

    def take(self, name: str, tenant: str, kind: str) -> None:
        """A place of this kind is taken, whether or not there was room: one that was let in before is not judged."""
        self._serial += 1
        self._holder(tenant).places[kind][name] = self._serial
        self.owners[name] = (tenant, kind)
        self._num_taken[kind] += 1

    def take_promised(self, name: str, tenant: str, now_s: float) -> None:
        """A request is here beyond all bounds."""
        self.advance(now_s)
        self._holder(tenant).promised_s[name] = self._now_s
        self.owners[name] = (tenant, None)
        self._num_promised += 1

    def settle(self, name: str) -> None:
        """A request keeps its place until it leaves: it is not displaced any more."""
        tenant, kind = self.owners[name]
        if kind is not None:
            places = self.holders[tenant].places[kind]
            places[name] = None
            places.move_to_end(name, last=False)

    def give_back(self, name: str) -> None:
        """A request is here no more."""
        tenant, kind = self.owners.pop(name)
        holder = self.holders[tenant]
        if kind is None:
            del holder.promised_s[name]
            self._num_promised -= 1
        else:
            del holder.places[kind][name]
            self._num_taken[kind] -= 1
        if holder.is_empty:
            del self.holders[tenant]
            self._forget(tenant)

    def left(self, now_s: float) -> None:
        """A place came free as places do: this measures how fast."""
        self.advance(now_s)
        self._left_s.append(self._now_s)

    def advance(self, now_s: float) -> None:
        """It is this late, or later; a tenant without a request for a minute that holds nothing is forgotten."""
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
        """Before it is noted anywhere."""
        if not self._is_sharing(tenant):
            self._num_sharing += 1
            self.sharing_weight += self._weight_of(tenant)

    def _forget(self, tenant: str) -> None:
        """After it was noted somewhere for the last time."""
        if not self._is_sharing(tenant):
            self._num_sharing -= 1
            # Sums of fractions drift; no tenants weigh nothing.
            self.sharing_weight = self.sharing_weight - self._weight_of(tenant) if self._num_sharing else 0.0
