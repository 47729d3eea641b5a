"""What waits, and what is next. Classes are head starts, tenants go by service received; everything is bounded.

    key = arrival - head start of the class          constant for life: no clock, no re-sorting

    next class    the one whose oldest waiting key is smallest
    next tenant   inside that class, the one served least so far, over its weight
    next request  of that tenant and class, the one with the smallest key

Service only grows. So a heap of tenants by service may hold values that are out of date, as long as they are too small:
what comes out on top is checked again, and pushed back if it has grown.

A caller requests a place and takes it with nothing in between; which request gets one, and which loses one, is decided
by `shares`. A preempted sequence comes back without a request: it was let in once.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from quire.core.request import PriorityClass, Request
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.shares import CLASS_RESERVE, Bounds, Denied, Granted, RetryReservations, Shares
from quire.errors import ConfigError, InvariantError

OUTPUT_TOKEN_COST = 4
"""An output token costs a tenant as much as this many computed prompt tokens."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Bounds and weights, fixed at start."""

    max_requests: int = 512
    high_head_start_s: float = 60.0
    normal_head_start_s: float = 20.0
    low_head_start_s: float = 0.0
    class_reserve: float = CLASS_RESERVE
    """Share of the queue kept for each class, so that a flood of one cannot shut out the others."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Tenants by name; they share the queue, and the service, in proportion. All others have weight 1."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ConfigError(f"expected max_requests of at least 1, got {self.max_requests}", code="queue_too_small")
        if not 0.0 <= self.class_reserve <= 1.0 / len(PriorityClass):
            rule = f"expected class_reserve between 0 and a third, got {self.class_reserve}"
            raise ConfigError(rule, code="invalid_class_reserve")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise ConfigError(f"expected the weight of a tenant above 0, got {weight} for {tenant!r}")

    def head_start_s(self, priority: PriorityClass) -> float:
        """How many seconds a class is worth."""
        return {
            PriorityClass.HIGH: self.high_head_start_s,
            PriorityClass.NORMAL: self.normal_head_start_s,
            PriorityClass.LOW: self.low_head_start_s,
        }[priority]

    def weight_of(self, tenant: str) -> float:
        """A tenant's weight."""
        return self.tenant_weights.get(tenant, 1.0)

    @property
    def bounds(self) -> Bounds:
        return Bounds.of_queue(self.max_requests, self.class_reserve, self.tenant_weights)


class Tenant:
    """Service received so far, and how many of its sequences wait and live."""

    __slots__ = ("name", "num_live", "num_waiting", "service", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.service = 0.0
        self.num_waiting = 0
        self.num_live = 0


SequenceKey = tuple[float, int]


class Line:
    """Sequences in order of their keys. Newcomers have the largest key so far and simply join the end; only those that
    come back, after a preemption or a crash, have to find their place, and they are few.
    """

    __slots__ = ("_last_key", "_returned_ids", "in_order", "returned")

    def __init__(self) -> None:
        self.in_order: OrderedDict[int, Sequence] = OrderedDict()
        self._last_key: SequenceKey = (-inf, 0)
        self.returned: list[tuple[SequenceKey, Sequence]] = []
        """A heap; those no longer in `_returned_ids` are gone."""
        self._returned_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self.in_order) + len(self._returned_ids)

    def add(self, sequence: Sequence) -> None:
        """Join the line at the place of its key."""
        if sequence.key > self._last_key or not self.in_order:
            self.in_order[sequence.sequence_id] = sequence
            self._last_key = sequence.key
        else:
            heappush(self.returned, (sequence.key, sequence))
            self._returned_ids.add(sequence.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Leave the line, from wherever."""
        if self.in_order.pop(sequence.sequence_id, None) is None:
            self._returned_ids.remove(sequence.sequence_id)
            if len(self.returned) > 2 * len(self._returned_ids) + 64:
                self.returned = [one for one in self.returned if one[1].sequence_id in self._returned_ids]
                heapify(self.returned)

    def first(self) -> Sequence | None:
        """The smallest key."""
        while self.returned and self.returned[0][1].sequence_id not in self._returned_ids:
            heappop(self.returned)
        newcomer = next(iter(self.in_order.values()), None)
        if not self.returned or (newcomer is not None and newcomer.key < self.returned[0][0]):
            return newcomer
        return self.returned[0][1]


class ClassQueue:
    """The waiting sequences of one class: all in one line, and each tenant's in a line of its own."""

    __slots__ = ("all_tenants", "by_service", "lines", "pushed", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Sequence] = {}
        self.all_tenants = Line()
        self.lines: dict[str, Line] = {}
        self.by_service: list[tuple[float, SequenceKey, str]] = []
        self.pushed: dict[str, tuple[float, SequenceKey]] = {}
        """What `by_service` last got for a tenant: any other entry of that tenant is out of date."""

    def add(self, sequence: Sequence, tenant: Tenant) -> None:
        """Let a sequence wait."""
        self.waiting[sequence.sequence_id] = sequence
        self.all_tenants.add(sequence)
        line = self.lines.get(tenant.name)
        if line is None:
            line = self.lines[tenant.name] = Line()
        line.add(sequence)
        self._push(tenant, line)

    def oldest_key(self) -> SequenceKey | None:
        """The smallest key that waits; None if none does."""
        oldest = self.all_tenants.first()
        return None if oldest is None else oldest.key

    def next(self, tenants: Mapping[str, Tenant]) -> Sequence:
        """The least served tenant's oldest sequence. At least one must be waiting."""
        while True:
            service, key, name = self.by_service[0]
            line = self.lines.get(name)
            if line is not None and self.pushed.get(name) == (service, key):
                oldest = line.first()
                if oldest is not None and oldest.key == key and tenants[name].service == service:
                    return oldest
                # It has received more since, or its oldest is gone: check it again later.
                heappop(self.by_service)
                del self.pushed[name]
                self._push(tenants[name], line)
            else:
                heappop(self.by_service)

    def remove(self, sequence: Sequence) -> None:
        """It starts, or will never start."""
        name = sequence.request.tenant
        del self.waiting[sequence.sequence_id]
        self.all_tenants.remove(sequence)
        line = self.lines[name]
        line.remove(sequence)
        if not line:
            # At rest nothing is left of any tenant.
            del self.lines[name]
            self.pushed.pop(name, None)
        if len(self.by_service) > 2 * len(self.lines) + 64:
            self.by_service = [entry for entry in self.by_service if self.pushed.get(entry[2]) == entry[:2]]
            heapify(self.by_service)

    def _push(self, tenant: Tenant, line: Line) -> None:
        oldest = line.first()
        if oldest is None:  # pragma: no cover - a line is dropped with its last sequence
            raise InvariantError(f"tenant {tenant.name!r} has no waiting request")
        entry, pushed = (tenant.service, oldest.key), self.pushed.get(tenant.name)
        if pushed is None or entry < pushed:
            self.pushed[tenant.name] = entry
            heappush(self.by_service, (*entry, tenant.name))


class WaitingQueue:
    """All that waits, in the order it will start."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.tenants: dict[str, Tenant] = {}
        self._active: dict[str, Tenant] = {}
        """Those with something alive."""
        self.classes = {priority: ClassQueue() for priority in PriorityClass}
        self.shares = Shares(config.bounds)
        """The places, by the ids of requests; a preempted one has none."""
        self.promises = RetryReservations()
        self.num_waiting = 0
        self._service_when_last_left = 0.0

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self.classes.values():
            yield from queue.waiting.values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.classes[sequence.request.priority].waiting

    def key(self, arrival_s: float, priority: PriorityClass, sequence_id: int) -> SequenceKey:
        """A sequence's urgency: smaller is sooner, and no two are equal."""
        return (arrival_s - self.config.head_start_s(priority), sequence_id)

    def request_place(self, request: Request, now_s: float) -> Granted:
        """Where a new request of this tenant and class would have its place. Raises QueueFullError or TenantShareError.

        They have a time to retry, and a tenant that waits for it is let in.
        """
        tenant, kind = request.tenant, request.priority.value
        has_reservation = self.promises.redeem(tenant, now_s) or request.has_reservation
        room = self.shares.request_place(tenant, kind, now_s, has_reservation=has_reservation)
        if isinstance(room, Denied):
            self.promises.reserve(tenant, now_s, room.retry_after_s)
            raise room.error
        return room

    def add(self, sequence: Sequence) -> None:
        """Take a place, which `request_place` has found to be there; a request let in before a crash just takes it."""
        request = sequence.request
        self.shares.take(request.request_id, request.tenant, request.priority.value)
        self._wait(sequence)

    def add_promised(self, sequence: Sequence) -> None:
        """Wait beyond all bounds: it came at the time it was promised, or had begun before a crash."""
        request = sequence.request
        self.shares.take_promised(request.request_id, request.tenant, request.arrival_s)
        self._wait(sequence)

    def displace(self, request: Request, now_s: float) -> int:
        """Another request gets the place of this one. Returns after how many seconds its client may retry."""
        retry_after_s = self.shares.retry_after_s(request.tenant, request.priority.value)
        self.promises.reserve(request.tenant, now_s, retry_after_s)
        return retry_after_s

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence waits again, with the key it always had."""
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        tenant = self.tenants[sequence.request.tenant]
        tenant.num_waiting += 1
        self.num_waiting += 1
        self.classes[sequence.request.priority].add(sequence, tenant)

    def head(self) -> Sequence | None:
        """What starts next. It is not skipped for one that would fit."""
        oldest = [(key, queue) for queue in self.classes.values() if (key := queue.oldest_key()) is not None]
        if not oldest:
            return None
        _, queue = min(oldest, key=lambda pair: pair[0])
        return queue.next(self.tenants)

    def remove(self, sequence: Sequence) -> None:
        """It starts, or is cancelled: its place is free."""
        request = sequence.request
        self.classes[request.priority].remove(sequence)
        self.tenants[request.tenant].num_waiting -= 1
        self.num_waiting -= 1
        if sequence.num_preemptions == 0:
            self.shares.give_back(request.request_id)

    def started(self, now_s: float) -> None:
        """One more has begun to run: how fast that goes is how long others have to wait."""
        self.shares.left(now_s)

    def charge(self, tenant_name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The tenant has received this much service."""
        tenant = self.tenants[tenant_name]
        tenant.service += (num_prompt_tokens + OUTPUT_TOKEN_COST * num_output_tokens) / tenant.weight

    def leave(self, tenant_name: str) -> None:
        """One of the tenant's sequences ended."""
        tenant = self.tenants[tenant_name]
        tenant.num_live -= 1
        if tenant.num_live == 0:
            del self._active[tenant_name]
            self._service_when_last_left = tenant.service

    def enter(self, name: str, num_sequences: int) -> None:
        """A tenant's request begins its life with this many sequences; each ends with `leave`."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, self.config.weight_of(name))
        if tenant.num_live == 0:
            # Idle tenants accumulate no credit: one returns level with the least served of those that wait, or
            # else of those that run, or else with the last that left.
            active = list(self._active.values())
            level = min((other.service for other in active if other.num_waiting), default=None)
            if level is None:
                level = min((other.service for other in active), default=self._service_when_last_left)
            tenant.service = max(tenant.service, level)
            self._active[name] = tenant
        tenant.num_live += num_sequences
