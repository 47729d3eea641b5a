"""Simulates a fleet in one thread: gateways that route, members that compute, and delayed messages between them.

    request ─► gateway ─► policy chooses ─► member: real scheduler, real memory ─► first token, last token
                  ▲                            │
                  ├── block events, delayed ───┤
                  └── load reports, delayed ───┘

One server is a fleet of one member. Every event has a time. Events are processed in order of time from one heap, and at
equal times in the order of their creation, so that equal seeds give equal logs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from quire.core.digests import block_hash
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Finished, FirstToken, KVEvent
from quire.engine.step_profile import StepProfile
from quire.errors import CapacityError, InvariantError, RequestError
from quire.fleet.routing.membership import GONE_AFTER_S, SUSPECT_AFTER_S, Membership, MemberState
from quire.fleet.routing.router import RoutedPrompt, Router
from quire.sim.fleet.member import Member, MemberSize
from quire.sim.fleet.member_slots import BlockHashes, Gateway, MemberSlot
from quire.sim.fleet.policies import POLICIES
from quire.sim.fleet.report import FleetReport, Latencies, MemberMetrics, Spread
from quire.workload.workload_request import WorkloadRequest

NEVER_S = 1e18
DROP_AFTER_HEARTBEATS = 4.5
"""Time without a heartbeat, in heartbeat periods, after which gateways drop a member."""


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """The probability of each kind of fault per check, and the time between checks; all zero: no faults."""

    period_s: float = 0.0
    """Time between two checks for new faults; 0: no checks."""
    death: float = 0.0
    """A member dies; its requests continue on other members."""
    drain: float = 0.0
    """A member accepts no new requests, and leaves when its requests have ended."""
    join: float = 0.0
    """An empty slot gets a new member."""
    clear: float = 0.0
    """A member's cache is cleared."""
    lost_events: float = 0.0
    """A batch of block events is lost."""

    @classmethod
    def per_minute(
        cls, deaths: float = 0.0, drains: float = 0.0, joins: float = 2.0, clears: float = 0.0, lost: float = 0.0
    ) -> "FleetFaults":
        """Build from the mean number of faults per simulated minute in the whole fleet (`joins`: per empty slot) and
        the share of event batches that is lost."""
        if not deaths + drains + clears:
            return cls(lost_events=lost)
        period_s = min(1.0, 60.0 / max(deaths, drains, joins, clears))
        minutes = period_s / 60.0
        return cls(period_s, deaths * minutes, drains * minutes, joins * minutes, clears * minutes, lost)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet, and the delays of its messages."""

    size: MemberSize
    profile: StepProfile
    policy: str = "cost"
    """A key of `POLICIES`."""
    num_members: int = 1
    num_gateways: int = 1
    event_delay_s: float = 0.05
    """Delay of block events from the end of a step to the gateways."""
    report_age_s: float = 0.0
    """Delay of load reports; 0: no reports, and each gateway counts only its own requests."""
    detect_delay_s: float = 0.0
    """Time without heartbeats until gateways drop a dead member; 0: at once, as when its connections break."""
    faults: FleetFaults = FleetFaults()
    seed: int = 0


class FleetSimulation:
    """One run. It ends when all requests have ended, or when `latencies` reports that the objective is missed."""

    def __init__(
        self, config: FleetConfig, requests: Iterable[WorkloadRequest], latencies: Latencies | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.latencies = latencies or Latencies()
        self.gateways = [self._gateway(number) for number in range(config.num_gateways)]
        self.needs_hashes = self.gateways[0].policy.needs_block_hashes
        self.member_slots = [MemberSlot(number) for number in range(config.num_members)]
        self._requests: Iterator[WorkloadRequest] = iter(requests)
        self.event_queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        self._hashes = BlockHashes(config.size)
        self._gateway_of: dict[str, int] = {}
        """Number of each request's gateway, by request name."""
        self._produced: dict[str, int] = {}
        """Number of output tokens of requests at the removal of their members."""
        self._waiting: deque[WorkloadRequest] = deque()
        """Requests that wait for a ready member."""
        self.num_arrived = self.num_refused = self.num_moves = self.num_deaths = self.num_sent_to_dead = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        for gateway in self.gateways if config.detect_delay_s else ():
            first_s = (
                config.detect_delay_s / DROP_AFTER_HEARTBEATS * Random(f"beats {config.seed} {gateway.number}").random()
            )
            self._schedule(first_s, self._check_heartbeats, gateway)
        for slot in self.member_slots:
            self.join(slot)
        self._next_arrival()
        if config.faults.period_s:
            self._schedule(config.faults.period_s, self._inject_faults)

    def _gateway(self, number: int) -> Gateway:
        seed = f"{self.config.seed} {number}"
        # Without a delay there are no heartbeats; the simulation removes dead members from the gateways at once.
        suspect_after_s = self.config.detect_delay_s or NEVER_S
        membership = Membership(suspect_after_s, suspect_after_s * GONE_AFTER_S / SUSPECT_AFTER_S)
        router = Router(membership, salt=str(Random(seed).getrandbits(32)))
        router.num_gateways = self.config.num_gateways
        return Gateway(number, router, POLICIES[self.config.policy](router, Random(seed)))

    def run(self) -> FleetReport:
        """Process events until the end of the run, and return the report."""
        while self.event_queue and (self.num_open or self._has_more) and not self.latencies.is_objective_missed:
            self.process_next_event()
        return self._report()

    def process_next_event(self) -> None:
        """Advance the clock to the next event and process it."""
        self.now_s, _, callback, arguments = heappop(self.event_queue)
        callback(*arguments)

    @property
    def num_open(self) -> int:
        return self.latencies.num_open

    # -- events --------------------------------------------------------------------------------------------------------

    def _schedule(self, time_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        heappush(self.event_queue, (time_s, next(self._order), callback, arguments))

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        self._has_more = request is not None
        if request is not None:
            self._schedule(max(request.arrival_s, self.now_s), self._arrive, request)

    def _arrive(self, request: WorkloadRequest) -> None:
        self._gateway_of[request.name] = self.num_arrived % len(self.gateways)
        self.num_arrived += 1
        self.num_prompt_tokens += len(request.prompt)
        self.latencies.record_arrival(request.name, self.now_s)
        self._send(request)
        self._next_arrival()

    # -- gateways ------------------------------------------------------------------------------------------------------

    def _send(self, request: WorkloadRequest) -> None:
        """Route a request: its gateway chooses a member, or the request waits if no member is ready."""
        gateway = self.gateways[self._gateway_of[request.name]]
        hashes = {self.config.size.block_size: self._hashes.of_prompt(request)} if self.needs_hashes else {}
        gateway.router.index.sweep(self.now_s)
        choice = gateway.policy.choose(RoutedPrompt(request.name, len(request.prompt), hashes), self.now_s)
        if choice is None:
            self._waiting.append(request)
            return
        slot = self.member_slots[int(choice.member)]
        self._log_event("sent", request.name, slot.number)
        if slot.number not in gateway.member_epochs:
            raise InvariantError(
                f"send: expected a member that the gateway knows for {request.name}, got dropped member {slot.number}"
            )
        if slot.member is None:
            slot.stranded[request.name] = request
            self.num_sent_to_dead += 1
            return
        try:
            num_uncached = len(request.prompt) - choice.num_cached_tokens
            slot.member.submit(request, self.now_s, self._produced.get(request.name, 0), num_uncached)
        except (RequestError, CapacityError):
            gateway.router.end_request(request.name)
            self.num_refused += 1
            self.latencies.record_rejection(request.name)
            self._forget(request.name)
            return
        slot.requests[request.name] = request
        slot.num_requests += 1
        if self.config.report_age_s:
            self._report_load(slot, slot.member)
        self.begin_step(slot)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            self._send(request)

    def _forget(self, name: str) -> None:
        del self._gateway_of[name]
        self._produced.pop(name, None)

    # -- members -------------------------------------------------------------------------------------------------------

    def begin_step(self, slot: MemberSlot) -> None:
        """Begin the member's next step, if it has no step in progress and work to do."""
        member = slot.member
        if member is None or member.step_in_progress is not None:
            return
        duration_s = member.begin_step(self.now_s)
        if duration_s is None:
            return
        self._schedule(self.now_s + duration_s, self._end_step, slot, slot.epoch)

    def _end_step(self, slot: MemberSlot, epoch: int) -> None:
        member = slot.member
        if member is None or slot.epoch != epoch:
            return
        for event in member.end_step(self.now_s):
            if isinstance(event, FirstToken):
                self._log_event("first", event.request_id, slot.number)
                self.latencies.record_first_token(event.request_id, self.now_s)
                self.num_cached_tokens += event.num_cached_tokens
                self.gateways[self._gateway_of[event.request_id]].router.mark_computed(event.request_id)
            elif isinstance(event, Finished):
                self._finish(slot, event.request_id)
        self._send_block_events(slot)
        if self.config.report_age_s:
            self._report_load(slot, member)
        self.begin_step(slot)

    def _finish(self, slot: MemberSlot, name: str) -> None:
        request = slot.requests.pop(name)
        self._log_event("ended", name, slot.number)
        self.latencies.record_end(name, request.max_tokens, self.now_s)
        self.gateways[self._gateway_of[name]].router.end_request(name)
        self._forget(name)
        if slot.is_draining and not slot.requests:
            self.leave(slot)

    def _send_block_events(self, slot: MemberSlot) -> None:
        """Send the step's block events to all gateways, with a delay."""
        if not slot.outbox:
            return
        events = list(slot.outbox)
        slot.outbox.clear()
        if self._random.random() < self.config.faults.lost_events:
            return
        self._schedule(self.now_s + self.config.event_delay_s, self._deliver_events, slot, slot.epoch, events)

    def _deliver_events(self, slot: MemberSlot, epoch: int, events: list[KVEvent]) -> None:
        for gateway in self.gateways:
            if gateway.member_epochs.get(slot.number) != epoch:
                continue
            for event in events:
                if isinstance(event, BlockStored):
                    gateway.router.index.add_blocks(slot.key, [block_hash(digest) for digest in event.digests])
                elif isinstance(event, BlockRemoved):
                    gateway.router.index.remove_blocks(slot.key, [block_hash(digest) for digest in event.digests])
                elif isinstance(event, AllBlocksCleared):
                    gateway.router.index.clear_blocks(slot.key)

    def _report_load(self, slot: MemberSlot, member: Member) -> None:
        """Send the member's load to all gateways, with a delay."""
        arguments = slot, slot.epoch, member.num_uncomputed_tokens, self.now_s
        self._schedule(self.now_s + self.config.report_age_s, self.deliver_load_report, *arguments)

    def deliver_load_report(self, slot: MemberSlot, epoch: int, num_tokens: int, as_of_s: float) -> None:
        """Deliver a load report to the gateways that know the member of this epoch."""
        for gateway in self.gateways:
            if gateway.member_epochs.get(slot.number) == epoch:
                gateway.router.loads.report(slot.key, num_tokens, as_of_s)

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def join(self, slot: MemberSlot) -> None:
        """Start a new member in this slot."""
        slot.epoch += 1
        slot.is_draining = False
        slot.member = Member(self.config.size, self.config.profile, slot.outbox.append if self.needs_hashes else None)
        # Gateways that had not detected the death of the previous member detect it when the new one joins.
        unaware = [gateway for gateway in self.gateways if slot.number in gateway.member_epochs]
        for gateway in self.gateways:
            gateway.drop_member(slot)
            gateway.member_epochs[slot.number] = slot.epoch
            gateway.router.join(slot.key, self.config.size.block_size, self.now_s)
            gateway.router.mark_ready(slot.key, self.now_s)
        self._move_stranded(slot, unaware)
        self._send_waiting()

    def leave(self, slot: MemberSlot, *, is_detected: bool = True) -> None:
        """Remove the member. When gateways detect this, its requests continue on other members with their output."""
        member = slot.remove_member()  # its requests are now in `slot.stranded`
        if member is None:
            return
        self._log_event("left", "", slot.number)
        for name in slot.stranded:
            self._produced[name] = member.num_produced(name)
        if is_detected:
            for gateway in self.gateways:
                gateway.drop_member(slot)
            self._move_stranded(slot, self.gateways)

    def _check_heartbeats(self, gateway: Gateway) -> None:
        """Deliver heartbeats of all live members to one gateway, which drops members without one for too long."""
        for slot in self.member_slots:
            if slot.member is not None:
                gateway.router.record_heartbeat(slot.key, self.now_s)
        changes = gateway.router.advance(self.now_s)
        for number in [int(change.member) for change in changes if change.old_state is not MemberState.SUSPECT]:
            self._log_event("silent", "", number)
            gateway.member_epochs.pop(number, None)
            self._move_stranded(self.member_slots[number], [gateway])
        self._schedule(self.now_s + self.config.detect_delay_s / DROP_AFTER_HEARTBEATS, self._check_heartbeats, gateway)

    def _move_stranded(self, slot: MemberSlot, gateways: Sequence[Gateway]) -> None:
        """Route the requests of a removed member again, at those of its gateways that have detected the removal."""
        aware = {gateway.number for gateway in gateways}
        for name, request in list(slot.stranded.items()):
            if self._gateway_of[name] in aware:
                del slot.stranded[name]
                self.gateways[self._gateway_of[name]].router.end_request(name)
                self.num_moves += 1
                self._send(request)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _inject_faults(self) -> None:
        """Inject random faults: members die, drain, join or lose their cache. One ready member always remains."""
        faults, occupied = self.config.faults, [slot for slot in self.member_slots if slot.member is not None]
        for slot in self.member_slots:
            if slot.member is None and self._random.random() < faults.join:
                self.join(slot)
        ready = [slot for slot in occupied if not slot.is_draining]
        if len(ready) > 1 and self._random.random() < faults.death:
            self.num_deaths += 1
            self.leave(self._random.choice(occupied), is_detected=not self.config.detect_delay_s)
        elif len(ready) > 1 and self._random.random() < faults.drain:
            self._drain(self._random.choice(ready))
        if self._random.random() < faults.clear and occupied:
            slot = self._random.choice(occupied)
            if slot.member is not None:
                slot.member.memory.clear()
        self._schedule(self.now_s + faults.period_s, self._inject_faults)

    def _drain(self, slot: MemberSlot) -> None:
        slot.is_draining = True
        for gateway in self.gateways:
            gateway.router.drain(slot.key)
        if not slot.requests:
            self.leave(slot)

    # -- log and report ------------------------------------------------------------------------------------------------

    def _log_event(self, kind: str, name: str, number: int) -> None:
        self._log.update(f"{self.now_s!r} {kind} {name} {number}\n".encode())

    def _report(self) -> FleetReport:
        for slot in self.member_slots:
            if slot.member is not None:
                slot.num_prompt_tokens_computed += slot.member.num_prompt_tokens_computed
                slot.busy_s += slot.member.busy_s
        return FleetReport(
            num_requests=self.num_arrived,
            num_refused=self.num_refused,
            num_lost=self.num_open,
            num_moves=self.num_moves,
            num_deaths=self.num_deaths,
            num_sent_to_dead=self.num_sent_to_dead,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.latencies.num_output_tokens,
            simulated_s=self.now_s,
            ttft_s=Spread.of(self.latencies.ttft_s),
            tpot_s=Spread.of(self.latencies.tpot_s),
            members=tuple(
                MemberMetrics(slot.number, slot.num_requests, slot.num_prompt_tokens_computed, slot.busy_s)
                for slot in self.member_slots
            ),
            log_digest=self._log.hexdigest(),
        )
