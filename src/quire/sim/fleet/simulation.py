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

from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Finished, FirstToken, KVEvent
from quire.engine.step_profile import StepProfile
from quire.errors import CapacityError, InvariantError, RequestError
from quire.fleet.routing.membership import GONE_AFTER_S, SUSPECT_AFTER_S, Membership, MemberState
from quire.fleet.routing.router import RoutedPrompt, Router
from quire.sim.fleet.member import Member, MemberSize
from quire.sim.fleet.member_slots import Gateway, MemberSlot, PromptNames, name_of
from quire.sim.fleet.policies import POLICIES
from quire.sim.fleet.report import FleetReport, Latencies, MemberFigures, Spread
from quire.workload.workload_request import WorkloadRequest

NEVER_S = 1e18
BEATS_UNTIL_SUSPECT = 4.5
"""Number of heartbeats that a member must miss before gateways drop it."""


@dataclass(frozen=True, slots=True)
class FleetFaults:
    """Probability of each fault per check; all zero: no faults."""

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
    def in_a_minute(
        cls, deaths: float = 0.0, drains: float = 0.0, joins: float = 2.0, clears: float = 0.0, lost: float = 0.0
    ) -> "FleetFaults":
        """Return rates from mean numbers per simulated minute, for the whole fleet (joins: for each empty slot), and
        the share of event batches that is lost."""
        if not deaths + drains + clears:
            return cls(lost_events=lost)
        period_s = min(1.0, 60.0 / max(deaths, drains, joins, clears))
        share = period_s / 60.0
        return cls(period_s, deaths * share, drains * share, joins * share, clears * share, lost)


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
    """Time until gateways drop a dead member; 0: immediately, as when its connections break."""
    faults: FleetFaults = FleetFaults()
    seed: int = 0


class FleetSimulation:
    """One run. `run` returns when every request has ended or cannot be served, or when `latencies` is hopeless."""

    def __init__(
        self, config: FleetConfig, requests: Iterable[WorkloadRequest], latencies: Latencies | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.latencies = latencies or Latencies()
        self.gateways = [self._gateway(number) for number in range(config.num_gateways)]
        self.wants_names = self.gateways[0].policy.wants_names
        self.member_slots = [MemberSlot(number) for number in range(config.num_members)]
        self._requests: Iterator[WorkloadRequest] = iter(requests)
        self.moments: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        self._names = PromptNames(config.size)
        self._homes: dict[str, int] = {}
        """Each request's gateway, by request name."""
        self._produced: dict[str, int] = {}
        """Number of output tokens of requests at the death of their members."""
        self._waiting: deque[WorkloadRequest] = deque()
        """Requests that wait for a ready member."""
        self.num_arrived = self.num_refused = self.num_moves = self.num_deaths = self.num_sent_to_dead = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        for gateway in self.gateways if config.detect_delay_s else ():
            first_s = (
                config.detect_delay_s / BEATS_UNTIL_SUSPECT * Random(f"beats {config.seed} {gateway.number}").random()
            )
            self._at(first_s, self._look, gateway)
        for slot in self.member_slots:
            self.join(slot)
        self._next_arrival()
        if config.faults.period_s:
            self._at(config.faults.period_s, self._disturb)

    def _gateway(self, number: int) -> Gateway:
        seed = f"{self.config.seed} {number}"
        # Without a delay there are no heartbeats, and the simulation itself reports deaths to the gateways.
        suspect_after_s = self.config.detect_delay_s or NEVER_S
        membership = Membership(suspect_after_s, suspect_after_s * GONE_AFTER_S / SUSPECT_AFTER_S)
        router = Router(membership, salt=str(Random(seed).getrandbits(32)))
        router.num_gateways = self.config.num_gateways
        return Gateway(number, router, POLICIES[self.config.policy](router, Random(seed)))

    def run(self) -> FleetReport:
        """Process events until the end of the run, and return the report."""
        while self.moments and (self.num_open or self._has_more) and not self.latencies.is_hopeless:
            self.happen()
        return self._report()

    def happen(self) -> None:
        """Process the next event."""
        self.now_s, _, happen, arguments = heappop(self.moments)
        happen(*arguments)

    @property
    def num_open(self) -> int:
        return self.latencies.num_open

    # -- moments -------------------------------------------------------------------------------------------------------

    def _at(self, moment_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        heappush(self.moments, (moment_s, next(self._order), happen, arguments))

    def _next_arrival(self) -> None:
        request = next(self._requests, None)
        self._has_more = request is not None
        if request is not None:
            self._at(max(request.arrival_s, self.now_s), self._arrive, request)

    def _arrive(self, request: WorkloadRequest) -> None:
        self._homes[request.name] = self.num_arrived % len(self.gateways)
        self.num_arrived += 1
        self.num_prompt_tokens += len(request.prompt)
        self.latencies.arrived(request.name, self.now_s)
        self._send(request)
        self._next_arrival()

    # -- gateways ------------------------------------------------------------------------------------------------------

    def _send(self, request: WorkloadRequest) -> None:
        """Let the request's gateway choose a member; the request waits if no member is ready."""
        gateway = self.gateways[self._homes[request.name]]
        names = {self.config.size.block_size: self._names.of_prompt(request)} if self.wants_names else {}
        gateway.router.index.sweep(self.now_s)
        choice = gateway.policy.choose(RoutedPrompt(request.name, len(request.prompt), names), self.now_s)
        if choice is None:
            self._waiting.append(request)
            return
        slot = self.member_slots[int(choice.member)]
        self._note("sent", request.name, slot.number)
        if slot.number not in gateway.known:
            raise InvariantError(
                f"send: member {slot.number} was chosen for {request.name} by a gateway that has recorded it as gone"
            )
        if slot.member is None:
            slot.stranded[request.name] = request
            self.num_sent_to_dead += 1
            return
        try:
            num_uncached = len(request.prompt) - choice.num_cached_tokens
            slot.member.submit(request, self.now_s, self._produced.get(request.name, 0), num_uncached)
        except (RequestError, CapacityError):
            gateway.router.ended(request.name)
            self.num_refused += 1
            self.latencies.dropped(request.name)
            self._forget(request.name)
            return
        slot.taken[request.name] = request
        slot.num_requests += 1
        if self.config.report_age_s:
            self._report_load(slot, slot.member)
        self.begin(slot)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            self._send(request)

    def _forget(self, name: str) -> None:
        del self._homes[name]
        self._produced.pop(name, None)

    # -- members -------------------------------------------------------------------------------------------------------

    def begin(self, slot: MemberSlot) -> None:
        """Begin the member's next step, if it has no step in progress and work to do."""
        member = slot.member
        if member is None or member.under_way is not None:
            return
        took_s = member.begin(self.now_s)
        if took_s is None:
            return
        self._at(self.now_s + took_s, self._end, slot, slot.epoch)

    def _end(self, slot: MemberSlot, epoch: int) -> None:
        member = slot.member
        if member is None or slot.epoch != epoch:
            return
        for event in member.end(self.now_s):
            if isinstance(event, FirstToken):
                self._note("first", event.request_id, slot.number)
                self.latencies.began(event.request_id, self.now_s)
                self.num_cached_tokens += event.num_cached_tokens
                self.gateways[self._homes[event.request_id]].router.computed(event.request_id)
            elif isinstance(event, Finished):
                self._finished(slot, event.request_id)
        self._announce(slot)
        if self.config.report_age_s:
            self._report_load(slot, member)
        self.begin(slot)

    def _finished(self, slot: MemberSlot, name: str) -> None:
        request = slot.taken.pop(name)
        self._note("ended", name, slot.number)
        self.latencies.ended(name, request.max_tokens, self.now_s)
        self.gateways[self._homes[name]].router.ended(name)
        self._forget(name)
        if slot.is_draining and not slot.taken:
            self.leave(slot)

    def _announce(self, slot: MemberSlot) -> None:
        """Send the step's block events to all gateways, with a delay."""
        if not slot.outbox:
            return
        events = list(slot.outbox)
        slot.outbox.clear()
        if self._random.random() < self.config.faults.lost_events:
            return
        self._at(self.now_s + self.config.event_delay_s, self._deliver_events, slot, slot.epoch, events)

    def _deliver_events(self, slot: MemberSlot, epoch: int, events: list[KVEvent]) -> None:
        for gateway in self.gateways:
            if gateway.known.get(slot.number) != epoch:
                continue
            for event in events:
                if isinstance(event, BlockStored):
                    gateway.router.index.stored(slot.key, [name_of(digest) for digest in event.digests])
                elif isinstance(event, BlockRemoved):
                    gateway.router.index.removed(slot.key, [name_of(digest) for digest in event.digests])
                elif isinstance(event, AllBlocksCleared):
                    gateway.router.index.cleared(slot.key)

    def _report_load(self, slot: MemberSlot, member: Member) -> None:
        """Send the member's load to all gateways, with a delay."""
        arguments = slot, slot.epoch, member.num_uncomputed_tokens, self.now_s
        self._at(self.now_s + self.config.report_age_s, self.load_reported, *arguments)

    def load_reported(self, slot: MemberSlot, epoch: int, num_tokens: int, as_of_s: float) -> None:
        """Deliver a load report to the gateways that know this member."""
        for gateway in self.gateways:
            if gateway.known.get(slot.number) == epoch:
                gateway.router.loads.report(slot.key, num_tokens, as_of_s)

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def join(self, slot: MemberSlot) -> None:
        """Start a new member in this slot."""
        slot.epoch += 1
        slot.is_draining = False
        slot.member = Member(self.config.size, self.config.profile, slot.outbox.append if self.wants_names else None)
        # The new member reveals the death of the previous one to gateways that had not detected it.
        unaware = [gateway for gateway in self.gateways if slot.number in gateway.known]
        for gateway in self.gateways:
            gateway.left(slot)
            gateway.known[slot.number] = slot.epoch
            gateway.router.join(slot.key, self.config.size.block_size, self.now_s)
            gateway.router.ready(slot.key, self.now_s)
        self._move_stranded(slot, unaware)
        self._send_waiting()

    def leave(self, slot: MemberSlot, *, is_detected: bool = True) -> None:
        """Remove the member. Once gateways detect it, its requests continue on other members, with their tokens."""
        member = slot.clear()
        if member is None:
            return
        self._note("left", "", slot.number)
        for name in slot.stranded:
            self._produced[name] = member.num_produced(name)
        if is_detected:
            for gateway in self.gateways:
                gateway.left(slot)
            self._move_stranded(slot, self.gateways)

    def _look(self, gateway: Gateway) -> None:
        """Deliver heartbeats of all live members to one gateway, which drops members that were silent for too long."""
        for slot in self.member_slots:
            if slot.member is not None:
                gateway.router.beat(slot.key, self.now_s)
        silent = [one for one in gateway.router.advance(self.now_s) if one.before is not MemberState.SUSPECT]
        for number in (int(one.member) for one in silent):
            self._note("silent", "", number)
            gateway.known.pop(number, None)
            self._move_stranded(self.member_slots[number], [gateway])
        self._at(self.now_s + self.config.detect_delay_s / BEATS_UNTIL_SUSPECT, self._look, gateway)

    def _move_stranded(self, slot: MemberSlot, gateways: Sequence[Gateway]) -> None:
        """Let these gateways, which have detected the member's death, route its requests again."""
        aware = {gateway.number for gateway in gateways}
        for name, request in list(slot.stranded.items()):
            if self._homes[name] in aware:
                del slot.stranded[name]
                self.gateways[self._homes[name]].router.ended(name)
                self.num_moves += 1
                self._send(request)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Let random members die, drain, join or lose their cache. At least one ready member always remains."""
        faults, there = self.config.faults, [slot for slot in self.member_slots if slot.member is not None]
        for slot in self.member_slots:
            if slot.member is None and self._random.random() < faults.join:
                self.join(slot)
        ready = [slot for slot in there if not slot.is_draining]
        if len(ready) > 1 and self._random.random() < faults.death:
            self.num_deaths += 1
            self.leave(self._random.choice(there), is_detected=not self.config.detect_delay_s)
        elif len(ready) > 1 and self._random.random() < faults.drain:
            self._drain(self._random.choice(ready))
        if self._random.random() < faults.clear and there:
            slot = self._random.choice(there)
            if slot.member is not None:
                slot.member.memory.clear()
        self._at(self.now_s + faults.period_s, self._disturb)

    def _drain(self, slot: MemberSlot) -> None:
        slot.is_draining = True
        for gateway in self.gateways:
            gateway.router.drain(slot.key)
        if not slot.taken:
            self.leave(slot)

    # -- the books -----------------------------------------------------------------------------------------------------

    def _note(self, what: str, name: str, number: int) -> None:
        self._log.update(f"{self.now_s!r} {what} {name} {number}\n".encode())

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
                MemberFigures(slot.number, slot.num_requests, slot.num_prompt_tokens_computed, slot.busy_s)
                for slot in self.member_slots
            ),
            log_digest=self._log.hexdigest(),
        )
