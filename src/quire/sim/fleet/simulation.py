"""A fleet in one thread: gateways that route, members that compute, messages that are delayed.

    request ─► gateway ─► policy chooses ─► member: real scheduler, real memory ─► first token, last token
                  ▲                            │
                  └── events of blocks, late ──┤
                  └── load reports, old ───────┘

One server is a fleet of one member. Every event has a time, and events are taken in order from one heap; at equal times
in the order they were created. So one seed gives one log.
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
from quire.core.inspect import invariants
from quire.engine.step_profile import StepProfile
from quire.errors import CapacityError, InvariantError, RequestError
from quire.fleet.routing.router import RoutedPrompt
from quire.sim.fleet.faults import FleetFaults
from quire.sim.fleet.latencies import Latencies, Spread
from quire.sim.fleet.member import Member, MemberSize
from quire.sim.fleet.member_slots import Gateway, MemberSlot, PromptNames, name_of
from quire.sim.fleet.policy_protocol import MakePolicy
from quire.sim.fleet.report import FleetReport, MemberFigures
from quire.workload.workload_request import WorkloadRequest

CHECK_EVERY_STEPS = 16
"""Steps of a member between two checks of its invariants, if they are checked."""
CHECK_EVERY_MOMENTS = 16
"""The same of gateways."""
BEATS_UNTIL_SUSPECT = 4.5
"""Heartbeats that a member has missed when it is dropped."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet, and the delays of its messages."""

    size: MemberSize
    profile: StepProfile
    make_policy: MakePolicy
    num_members: int = 1
    num_gateways: int = 1
    event_delay_s: float = 0.05
    """From a step's end to the gateways."""
    report_age_s: float = 0.0
    """Age of load reports; 0: no reports, each gateway counts only its own requests."""
    detect_delay_s: float = 0.0
    """Time until gateways drop a dead member; 0: its connections break, and all gateways detect it at once."""
    faults: FleetFaults = FleetFaults()  # noqa: RUF009 - frozen
    seed: int = 0
    is_checked: bool = False
    """Whether invariants are checked during the run."""


class FleetSimulation:
    """One run. `run` ends when every request has its last token or can never be served, or when `latencies` do not need
    the rest."""

    def __init__(
        self, config: FleetConfig, requests: Iterable[WorkloadRequest], latencies: Latencies | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.latencies = latencies or Latencies()
        self.gateways = [
            Gateway(at, config.make_policy(Random(f"{config.seed} {at}"))) for at in range(config.num_gateways)
        ]
        self.wants_names = self.gateways[0].policy.wants_names
        self.member_slots = [MemberSlot(number) for number in range(config.num_members)]
        self._requests: Iterator[WorkloadRequest] = iter(requests)
        self.moments: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        self._names = PromptNames(config.size)
        self._homes: dict[str, int] = {}
        """Request -> its gateway."""
        self._produced: dict[str, int] = {}
        """Tokens that requests had when their members died."""
        self._waiting: deque[WorkloadRequest] = deque()
        """Requests without a member that can take them yet."""
        self.num_arrived = self.num_refused = self.num_moves = self.num_deaths = self.num_sent_to_dead = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        for gateway in self.gateways if config.detect_delay_s else ():
            gateway.policy.watch(config.detect_delay_s)
            first_s = (
                config.detect_delay_s / BEATS_UNTIL_SUSPECT * Random(f"beats {config.seed} {gateway.number}").random()
            )
            self._at(first_s, self._look, gateway)
        for slot in self.member_slots:
            self.join(slot)
        self._next_arrival()
        if config.faults.period_s:
            self._at(config.faults.period_s, self._disturb)

    def run(self) -> FleetReport:
        """Process events until the end."""
        while self.moments and (self.num_open or self._has_more) and not self.latencies.is_hopeless:
            self.now_s, number, happen, arguments = heappop(self.moments)
            happen(*arguments)
            if self.config.is_checked and number % CHECK_EVERY_MOMENTS == 0:
                self._check()
        return self._report()

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
        """The request's gateway chooses a member; without any the request waits."""
        gateway = self.gateways[self._homes[request.name]]
        names = {self.config.size.block_size: self._names.of_prompt(request)} if self.wants_names else {}
        sent = gateway.policy.choose(RoutedPrompt(request.name, len(request.prompt), names), self.now_s)
        if sent is None:
            self._waiting.append(request)
            return
        slot = self.member_slots[sent.member]
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
            slot.member.submit(request, self.now_s, self._produced.get(request.name, 0), sent.num_uncached_tokens)
        except (RequestError, CapacityError):
            gateway.policy.ended(request.name)
            self.num_refused += 1
            self.latencies.dropped(request.name)
            self._forget(request.name)
            return
        slot.taken[request.name] = request
        slot.num_requests += 1
        if self.config.report_age_s:
            self._report_load(slot, slot.member)
        self._begin(slot)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            self._send(request)

    def _forget(self, name: str) -> None:
        del self._homes[name]
        self._produced.pop(name, None)

    # -- members -------------------------------------------------------------------------------------------------------

    def _begin(self, slot: MemberSlot) -> None:
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
                self.gateways[self._homes[event.request_id]].policy.computed(event.request_id)
            elif isinstance(event, Finished):
                self._finished(slot, event.request_id)
        self._announce(slot)
        if self.config.report_age_s:
            self._report_load(slot, member)
        if self.config.is_checked and member.scheduler.stats.num_steps % CHECK_EVERY_STEPS == 0:
            invariants.check(member.memory)
            invariants.check_scheduler(member.scheduler)
        self._begin(slot)

    def _finished(self, slot: MemberSlot, name: str) -> None:
        request = slot.taken.pop(name)
        self._note("ended", name, slot.number)
        self.latencies.ended(name, request.max_tokens, self.now_s)
        self.gateways[self._homes[name]].policy.ended(name)
        self._forget(name)
        if slot.is_draining and not slot.taken:
            self.leave(slot)

    def _announce(self, slot: MemberSlot) -> None:
        """Send the step's block events to every gateway, with a delay."""
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
                    gateway.policy.stored(slot.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, BlockRemoved):
                    gateway.policy.removed(slot.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, AllBlocksCleared):
                    gateway.policy.cleared(slot.number)

    def _report_load(self, slot: MemberSlot, member: Member) -> None:
        """Send the member's load to every gateway, with a delay."""
        arguments = slot, slot.epoch, member.num_uncomputed_tokens, self.now_s
        self._at(self.now_s + self.config.report_age_s, self.load_reported, *arguments)

    def load_reported(self, slot: MemberSlot, epoch: int, num_tokens: int, as_of_s: float) -> None:
        """Gateways that know this life of the member receive its load."""
        for gateway in self.gateways:
            if gateway.known.get(slot.number) == epoch:
                gateway.policy.reported(slot.number, num_tokens, as_of_s, len(self.gateways))

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def join(self, slot: MemberSlot) -> None:
        """A new life of the member in this slot."""
        slot.epoch += 1
        slot.is_draining = False
        slot.member = Member(self.config.size, self.config.profile, slot.outbox.append if self.wants_names else None)
        # Gateways that had not detected the death of the previous member detect it now.
        unaware = [gateway for gateway in self.gateways if slot.number in gateway.known]
        for gateway in self.gateways:
            gateway.left(slot)
            gateway.known[slot.number] = slot.epoch
            gateway.policy.joined(slot.number, self.now_s)
        self._move_stranded(slot, unaware)
        self._send_waiting()

    def leave(self, slot: MemberSlot, *, is_detected: bool = True) -> None:
        """Remove the member. Its requests continue elsewhere, with their tokens, once their gateways detect it."""
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
        """Heartbeats of all live members reach one gateway, and it drops members that were silent for too long."""
        for slot in self.member_slots:
            if slot.member is not None:
                gateway.policy.beat(slot.number, self.now_s)
        for number in gateway.policy.silent(self.now_s):
            self._note("silent", "", number)
            gateway.known.pop(number, None)
            self._move_stranded(self.member_slots[number], [gateway])
        self._at(self.now_s + self.config.detect_delay_s / BEATS_UNTIL_SUSPECT, self._look, gateway)

    def _move_stranded(self, slot: MemberSlot, gateways: Sequence[Gateway]) -> None:
        """These gateways have detected the member's death: they route its requests again."""
        aware = {gateway.number for gateway in gateways}
        for name, request in list(slot.stranded.items()):
            if self._homes[name] in aware:
                del slot.stranded[name]
                self.gateways[self._homes[name]].policy.ended(name)
                self.num_moves += 1
                self._send(request)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """A random member dies, drains or comes back. One that takes work always stays."""
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
            gateway.policy.draining(slot.number)
        if not slot.taken:
            self.leave(slot)

    # -- the books -----------------------------------------------------------------------------------------------------

    def _note(self, what: str, name: str, number: int) -> None:
        self._log.update(f"{self.now_s!r} {what} {name} {number}\n".encode())

    def _check(self) -> None:
        """Check that every request is in exactly one place, and that gateways account for their own."""
        by_gateway: list[list[str]] = [[] for _ in self.gateways]
        for slot in self.member_slots:
            for name in (*slot.taken, *slot.stranded):
                by_gateway[self._homes[name]].append(name)
        num_known = sum(map(len, by_gateway)) + len(self._waiting)
        if num_known != self.num_open:
            rule = f"check: {self.num_open} requests are open, {num_known} known"
            raise InvariantError(rule, code="requests_miscounted")
        for gateway, names in zip(self.gateways, by_gateway, strict=True):
            gateway.policy.check(names)

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
