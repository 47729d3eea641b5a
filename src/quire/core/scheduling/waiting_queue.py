"""The waiting queue, of bounded size: which sequence starts next. A priority class is a head start of some seconds.
Tenants share fairly by *service*: the tokens computed and produced for them so far.

    key = arrival - head start of the class          constant, so the queue is never sorted again

    next class    the class with the smallest waiting key
    next tenant   within this class, the tenant with the least service, divided by its weight
    next request  of this tenant and class, the one with the smallest key

Service only increases. So the heap of tenants by service may contain outdated values, which are too small: the top
entry is checked against the current value, and pushed again if that has increased.

A new request needs a place; `shares` decides which request gets a place and which is displaced. The caller must take
a granted place at once. Preempted sequences return to the queue without a place.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from quire.core.request import PriorityClass, Request
from quire.core.scheduling.sequence import Sequence
from quire.core.scheduling.shares import Bounds, Denied, Granted, RetryReservations, Shares
from quire.errors import ConfigError, InvariantError

OUTPUT_TOKEN_COST = 4
"""The service of one output token, in computed prompt tokens."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Limits, head starts and weights, fixed at start."""

    max_requests: int = 512
    high_head_start_s: float = 60.0
    normal_head_start_s: float = 20.0
    low_head_start_s: float = 0.0
    class_reserve: float = 0.1
    """Fraction of the queue reserved for each class, so that a flood of one class cannot exclude the others."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> weight; all other tenants have weight 1. Queue places and service are shared in proportion."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ConfigError(f"expected max_requests of at least 1, got {self.max_requests}", code="queue_too_small")
        if not 0.0 <= self.class_reserve <= 1.0 / len(PriorityClass):
            message = f"expected class_reserve between 0 and 1/3, got {self.class_reserve}"
            raise ConfigError(message, code="invalid_class_reserve")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise ConfigError(f"expected a tenant weight above 0, got {weight} for {tenant!r}")

    def head_start_s(self, priority: PriorityClass) -> float:
        """Return the head start of a class in seconds."""
        return {
            PriorityClass.HIGH: self.high_head_start_s,
            PriorityClass.NORMAL: self.normal_head_start_s,
            PriorityClass.LOW: self.low_head_start_s,
        }[priority]

    @property
    def bounds(self) -> Bounds:
        kinds = tuple(priority.value for priority in PriorityClass)
        return Bounds(self.max_requests, kinds, int(self.max_requests * self.class_reserve), self.tenant_weights)


@dataclass(eq=False, slots=True)
class Tenant:
    """A tenant's service so far, and its numbers of waiting and of live (waiting or running) sequences."""

    name: str
    weight: float
    service: float = 0.0
    num_waiting: int = 0
    num_live: int = 0


SequenceKey = tuple[float, int]


class Line:
    """A queue of sequences in order of their keys. Most new sequences have the largest key so far and are appended; the
    few that return after a preemption or a crash are in a heap.
    """

    def __init__(self) -> None:
        self.in_order: OrderedDict[int, Sequence] = OrderedDict()
        self._last_key: SequenceKey = (-inf, 0)
        self.heap: list[tuple[SequenceKey, Sequence]] = []
        """A heap of returned sequences; entries whose id is not in `_returned_ids` were removed."""
        self._returned_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self.in_order) + len(self._returned_ids)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its key."""
        if sequence.key > self._last_key or not self.in_order:
            self.in_order[sequence.sequence_id] = sequence
            self._last_key = sequence.key
        else:
            heappush(self.heap, (sequence.key, sequence))
            self._returned_ids.add(sequence.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from any position."""
        if self.in_order.pop(sequence.sequence_id, None) is None:
            self._returned_ids.remove(sequence.sequence_id)
            if len(self.heap) > 2 * len(self._returned_ids) + 64:
                self.heap = [entry for entry in self.heap if entry[1].sequence_id in self._returned_ids]
                heapify(self.heap)

    def first(self) -> Sequence | None:
        """Return the sequence with the smallest key; None if the line is empty."""
        while self.heap and self.heap[0][1].sequence_id not in self._returned_ids:
            heappop(self.heap)
        newcomer = next(iter(self.in_order.values()), None)
        if not self.heap or (newcomer is not None and newcomer.key < self.heap[0][0]):
            return newcomer
        return self.heap[0][1]


class ClassQueue:
    """The waiting sequences of one priority class, in one `Line` of all tenants and one `Line` per tenant."""

    def __init__(self) -> None:
        self.waiting: dict[int, Sequence] = {}
        self.all_tenants = Line()
        self.lines: dict[str, Line] = {}
        self.by_service: list[tuple[float, SequenceKey, str]] = []
        self.entries: dict[str, tuple[float, SequenceKey]] = {}
        """Tenant -> its current entry in the heap `by_service`; other entries of the tenant are outdated."""

    def add(self, sequence: Sequence, tenant: Tenant) -> None:
        """Add a waiting sequence."""
        self.waiting[sequence.sequence_id] = sequence
        self.all_tenants.add(sequence)
        line = self.lines.get(tenant.name)
        if line is None:
            line = self.lines[tenant.name] = Line()
        line.add(sequence)
        self._push(tenant, line)

    def next(self, tenants: Mapping[str, Tenant]) -> Sequence:
        """Return the first sequence of the tenant with the least service. At least one sequence must be waiting."""
        while True:
            service, key, name = self.by_service[0]
            line = self.lines.get(name)
            if line is not None and self.entries.get(name) == (service, key):
                first = line.first()
                if first is not None and first.key == key and tenants[name].service == service:
                    return first
                # The entry is outdated: service has increased, or the first sequence has changed. Push a current entry.
                heappop(self.by_service)
                del self.entries[name]
                self._push(tenants[name], line)
            else:
                heappop(self.by_service)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, because it starts or ends."""
        name = sequence.request.tenant
        del self.waiting[sequence.sequence_id]
        self.all_tenants.remove(sequence)
        line = self.lines[name]
        line.remove(sequence)
        if not line:
            # Keep no data of tenants without waiting sequences.
            del self.lines[name]
            self.entries.pop(name, None)
        if len(self.by_service) > 2 * len(self.lines) + 64:
            self.by_service = [entry for entry in self.by_service if self.entries.get(entry[2]) == entry[:2]]
            heapify(self.by_service)

    def _push(self, tenant: Tenant, line: Line) -> None:
        first = line.first()
        if first is None:  # pragma: no cover - a line is dropped with its last sequence
            raise InvariantError(f"tenant {tenant.name!r} has no waiting request")
        entry, old_entry = (tenant.service, first.key), self.entries.get(tenant.name)
        if old_entry is None or entry < old_entry:
            self.entries[tenant.name] = entry
            heappush(self.by_service, (*entry, tenant.name))


class WaitingQueue:
    """The waiting sequences of all priority classes, and the service of all tenants."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.tenants: dict[str, Tenant] = {}
        self._active: dict[str, Tenant] = {}
        """Tenants with live sequences."""
        self.classes = {priority: ClassQueue() for priority in PriorityClass}
        self.shares = Shares(config.bounds)
        """The places in the queue, by request id; preempted sequences have no place."""
        self.reservations = RetryReservations()
        self.num_waiting = 0
        self._service_when_last_left = 0.0

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self.classes.values():
            yield from queue.waiting.values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.classes[sequence.request.priority].waiting

    def key(self, request: Request, arrival_s: float, sequence_id: int) -> SequenceKey:
        """Return the key of a sequence: smaller is more urgent, and keys are unique."""
        return (arrival_s - self.config.head_start_s(request.priority), sequence_id)

    def request_place(self, request: Request, now_s: float) -> Granted:
        """Request a place for a new request. Raises QueueFullError or TenantShareError if it is refused.

        The errors have a retry delay; a tenant that retries after this delay is accepted.
        """
        tenant, kind = request.tenant, request.priority.value
        has_reservation = self.reservations.redeem(tenant, now_s) or request.has_reservation
        decision = self.shares.request_place(tenant, kind, now_s, has_reservation=has_reservation)
        if isinstance(decision, Denied):
            self.reservations.reserve(tenant, now_s, decision.retry_after_s)
            raise decision.error
        return decision

    def add(self, sequence: Sequence) -> None:
        """Add a sequence and take a place, which `request_place` has granted; restored requests need no grant."""
        request = sequence.request
        self.shares.take(request.request_id, request.tenant, request.priority.value)
        self.wait(sequence)

    def add_promised(self, sequence: Sequence) -> None:
        """Add a sequence beyond all limits: its request was accepted by reservation, or had tokens before a crash."""
        request = sequence.request
        self.shares.take_promised(request.request_id, request.tenant, request.arrival_s)
        self.wait(sequence)

    def displace(self, request: Request, now_s: float) -> int:
        """Reserve a retry for a displaced request, and return the delay in seconds before its client may retry."""
        retry_after_s = self.shares.retry_after_s(request.tenant, request.priority.value)
        self.reservations.reserve(request.tenant, now_s, retry_after_s)
        return retry_after_s

    def wait(self, sequence: Sequence) -> None:
        """Add a sequence without taking a place. Preempted sequences return in this way, with their old keys."""
        tenant = self.tenants[sequence.request.tenant]
        tenant.num_waiting += 1
        self.num_waiting += 1
        self.classes[sequence.request.priority].add(sequence, tenant)

    def head(self) -> Sequence | None:
        """Return the sequence that starts next, or None. If it does not fit, no other sequence starts instead."""
        candidates = [(first.key, queue) for queue in self.classes.values() if (first := queue.all_tenants.first())]
        if not candidates:
            return None
        _, queue = min(candidates, key=lambda pair: pair[0])
        return queue.next(self.tenants)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, because it starts or ends, and free its place."""
        request = sequence.request
        self.classes[request.priority].remove(sequence)
        self.tenants[request.tenant].num_waiting -= 1
        self.num_waiting -= 1
        if sequence.num_preemptions == 0:
            self.shares.give_back(request.request_id)

    def charge(self, tenant_name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Add computed prompt tokens and output tokens to a tenant's service."""
        tenant = self.tenants[tenant_name]
        tenant.service += (num_prompt_tokens + OUTPUT_TOKEN_COST * num_output_tokens) / tenant.weight

    def leave(self, tenant_name: str) -> None:
        """Record that one of the tenant's live sequences ended."""
        tenant = self.tenants[tenant_name]
        tenant.num_live -= 1
        if tenant.num_live == 0:
            del self._active[tenant_name]
            self._service_when_last_left = tenant.service

    def enter(self, name: str, num_sequences: int) -> None:
        """Record a new request of the tenant with this many sequences; each must end with `leave`."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, self.config.tenant_weights.get(name, 1.0))
        if tenant.num_live == 0:
            # Idle tenants accumulate no credit: a returning tenant is raised to the least service of the tenants
            # with waiting sequences; else of those with running ones; else of the last tenant that became idle.
            active = list(self._active.values())
            min_service = min((other.service for other in active if other.num_waiting), default=None)
            if min_service is None:
                min_service = min((other.service for other in active), default=self._service_when_last_left)
            tenant.service = max(tenant.service, min_service)
            self._active[name] = tenant
        tenant.num_live += num_sequences
