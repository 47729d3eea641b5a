"""A fleet in one thread: gateways that choose, members that compute, messages that take their time.

    request ─► gateway ─► policy chooses ─► member: real scheduler, real memory ─► first token, last token
                  ▲                            │
                  └── events of blocks, late ──┤
                  └── load reports, old ───────┘

One server is a fleet of one member, whose gateway has nothing to choose. Whatever happens has a moment, and moments are
taken in order from one heap; equal ones in the order they were made. So one seed gives one log.
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
from quire.sim.fleet.policy_protocol import MakePolicy
from quire.sim.fleet.report import FleetReport, MemberFigures
from quire.sim.fleet.seats import Gateway, PromptNames, Seat, name_of
from quire.workload.workload_request import WorkloadRequest

CHECK_EVERY_STEPS = 16
"""Steps of a member between two looks at all its invariants, where that is asked for."""
CHECK_EVERY_MOMENTS = 16
"""The same of gateways."""
BEATS_UNTIL_SUSPECT = 4.5
"""Beats that a member has missed when it is given up."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet, and how its messages travel."""

    size: MemberSize
    profile: StepProfile
    make_policy: MakePolicy
    num_members: int = 1
    num_gateways: int = 1
    event_delay_s: float = 0.05
    """From a step's end to the gateways."""
    report_age_s: float = 0.0
    """How old what gateways know of members' load is; 0: nobody reports, each knows what it sent."""
    detect_delay_s: float = 0.0
    """How long a dead member is silent before gateways give it up; 0: its connections break, and all hear at once."""
    faults: FleetFaults = FleetFaults()  # noqa: RUF009 - frozen
    seed: int = 0
    is_checked: bool = False
    """Whether invariants are looked at throughout."""


class FleetSimulation:
    """One run. `run` ends when every request has its last token, or nobody will ever take it, or `latencies` say that
    the rest is not needed."""

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
        self.seats = [Seat(number) for number in range(config.num_members)]
        self._requests: Iterator[WorkloadRequest] = iter(requests)
        self._moments: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        self._names = PromptNames(config.size)
        self._homes: dict[str, int] = {}
        """Which gateway has whose stream."""
        self._produced: dict[str, int] = {}
        """Tokens that requests had when their members died."""
        self._waiting: deque[WorkloadRequest] = deque()
        """Nobody could take these yet."""
        self.num_arrived = self.num_refused = self.num_moves = self.num_deaths = self.num_sent_to_dead = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        for gateway in self.gateways if config.detect_delay_s else ():
            gateway.policy.watch(config.detect_delay_s)
            first_s = (
                config.detect_delay_s / BEATS_UNTIL_SUSPECT * Random(f"beats {config.seed} {gateway.number}").random()
            )
            self._at(first_s, self._look, gateway)
        for seat in self.seats:
            self._join(seat)
        self._next_arrival()
        if config.faults.period_s:
            self._at(config.faults.period_s, self._disturb)

    def run(self) -> FleetReport:
        """Moment after moment."""
        while self._moments and (self.num_open or self._has_more) and not self.latencies.is_hopeless:
            self.now_s, number, happen, told = heappop(self._moments)
            happen(*told)
            if self.config.is_checked and number % CHECK_EVERY_MOMENTS == 0:
                self._check()
        return self._report()

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not ended."""
        return self.latencies.num_open

    # -- moments -------------------------------------------------------------------------------------------------------

    def _at(self, moment_s: float, happen: Callable[..., None], *told: Any) -> None:
        heappush(self._moments, (moment_s, next(self._order), happen, told))

    def _next_arrival(self) -> None:
        asked = next(self._requests, None)
        self._has_more = asked is not None
        if asked is not None:
            self._at(max(asked.arrival_s, self.now_s), self._arrive, asked)

    def _arrive(self, asked: WorkloadRequest) -> None:
        self._homes[asked.name] = self.num_arrived % len(self.gateways)
        self.num_arrived += 1
        self.num_prompt_tokens += len(asked.prompt)
        self.latencies.arrived(asked.name, self.now_s)
        self._send(asked)
        self._next_arrival()

    # -- gateways ------------------------------------------------------------------------------------------------------

    def _send(self, asked: WorkloadRequest) -> None:
        """Its gateway chooses a member; while there is none it waits there."""
        gateway = self.gateways[self._homes[asked.name]]
        names = {self.config.size.block_size: self._names.of_prompt(asked)} if self.wants_names else {}
        sent = gateway.policy.choose(RoutedPrompt(asked.name, len(asked.prompt), names), self.now_s)
        if sent is None:
            self._waiting.append(asked)
            return
        seat = self.seats[sent.member]
        self._note("sent", asked.name, seat.number)
        if seat.number not in gateway.known:
            raise InvariantError(f"send: {seat.number} was chosen for {asked.name}, and its gateway knows it is gone")
        if seat.member is None:
            seat.stranded[asked.name] = asked
            self.num_sent_to_dead += 1
            return
        try:
            seat.member.submit(asked, self.now_s, self._produced.get(asked.name, 0), sent.num_uncached_tokens)
        except (RequestError, CapacityError):
            gateway.policy.ended(asked.name)
            self.num_refused += 1
            self.latencies.dropped(asked.name)
            self._forget(asked.name)
            return
        seat.taken[asked.name] = asked
        seat.num_requests += 1
        if self.config.report_age_s:
            self._report_load(seat, seat.member)
        self._begin(seat)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            self._send(asked)

    def _forget(self, name: str) -> None:
        del self._homes[name]
        self._produced.pop(name, None)

    # -- members -------------------------------------------------------------------------------------------------------

    def _begin(self, seat: Seat) -> None:
        member = seat.member
        if member is None or member.under_way is not None:
            return
        took_s = member.begin(self.now_s)
        if took_s is None:
            return
        self._at(self.now_s + took_s, self._end, seat, seat.epoch)

    def _end(self, seat: Seat, epoch: int) -> None:
        member = seat.member
        if member is None or seat.epoch != epoch:
            return
        for event in member.end(self.now_s):
            if isinstance(event, FirstToken):
                self._note("first", event.request_id, seat.number)
                self.latencies.began(event.request_id, self.now_s)
                self.num_cached_tokens += event.num_cached_tokens
                self.gateways[self._homes[event.request_id]].policy.computed(event.request_id)
            elif isinstance(event, Finished):
                self._finished(seat, event.request_id)
        self._announce(seat)
        if self.config.report_age_s:
            self._report_load(seat, member)
        if self.config.is_checked and member.scheduler.stats.num_steps % CHECK_EVERY_STEPS == 0:
            invariants.check(member.memory)
            invariants.check_scheduler(member.scheduler)
        self._begin(seat)

    def _finished(self, seat: Seat, name: str) -> None:
        asked = seat.taken.pop(name)
        self._note("ended", name, seat.number)
        self.latencies.ended(name, asked.max_tokens, self.now_s)
        self.gateways[self._homes[name]].policy.ended(name)
        self._forget(name)
        if seat.is_draining and not seat.taken:
            self._leave(seat)

    def _announce(self, seat: Seat) -> None:
        """What the step did to blocks, to every gateway, some time later."""
        if not seat.outbox:
            return
        told = list(seat.outbox)
        seat.outbox.clear()
        if self._random.random() < self.config.faults.lost_events:
            return
        self._at(self.now_s + self.config.event_delay_s, self._heard, seat, seat.epoch, told)

    def _heard(self, seat: Seat, epoch: int, told: list[KVEvent]) -> None:
        for gateway in self.gateways:
            if gateway.known.get(seat.number) != epoch:
                continue
            for event in told:
                if isinstance(event, BlockStored):
                    gateway.policy.stored(seat.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, BlockRemoved):
                    gateway.policy.removed(seat.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, AllBlocksCleared):
                    gateway.policy.cleared(seat.number)

    def _report_load(self, seat: Seat, member: Member) -> None:
        """How much waits there now that it has changed, to every gateway, when it is so old."""
        told = seat, seat.epoch, member.num_uncomputed_tokens, self.now_s
        self._at(self.now_s + self.config.report_age_s, self._load_reported, *told)

    def _load_reported(self, seat: Seat, epoch: int, num_tokens: int, as_of_s: float) -> None:
        for gateway in self.gateways:
            if gateway.known.get(seat.number) == epoch:
                gateway.policy.reported(seat.number, num_tokens, as_of_s, len(self.gateways))

    # -- who is there --------------------------------------------------------------------------------------------------

    def _join(self, seat: Seat) -> None:
        seat.epoch += 1
        seat.is_draining = False
        seat.member = Member(self.config.size, self.config.profile, seat.outbox.append if self.wants_names else None)
        # Who had not heard of the death of the one before hears it now.
        unaware = [gateway for gateway in self.gateways if seat.number in gateway.known]
        for gateway in self.gateways:
            gateway.left(seat)
            gateway.known[seat.number] = seat.epoch
            gateway.policy.joined(seat.number, self.now_s)
        self._move_stranded(seat, unaware)
        self._send_waiting()

    def _leave(self, seat: Seat, *, is_told: bool = True) -> None:
        """Nobody sits here any more. What it had goes on elsewhere, with the tokens it has, when its gateways know."""
        member = seat.vacate()
        if member is None:
            return
        self._note("left", "", seat.number)
        for name in seat.stranded:
            self._produced[name] = member.num_produced(name)
        if is_told:
            for gateway in self.gateways:
                gateway.left(seat)
            self._move_stranded(seat, self.gateways)

    def _look(self, gateway: Gateway) -> None:
        """Beats of all who live reach one gateway, and it gives up who was silent for long."""
        for seat in self.seats:
            if seat.member is not None:
                gateway.policy.beat(seat.number, self.now_s)
        for number in gateway.policy.silent(self.now_s):
            self._note("silent", "", number)
            gateway.known.pop(number, None)
            self._move_stranded(self.seats[number], [gateway])
        self._at(self.now_s + self.config.detect_delay_s / BEATS_UNTIL_SUSPECT, self._look, gateway)

    def _move_stranded(self, seat: Seat, gateways: Sequence[Gateway]) -> None:
        """These know that the member is dead: what they had given to it goes elsewhere."""
        aware = {gateway.number for gateway in gateways}
        for name, asked in list(seat.stranded.items()):
            if self._homes[name] in aware:
                del seat.stranded[name]
                self.gateways[self._homes[name]].policy.ended(name)
                self.num_moves += 1
                self._send(asked)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Somebody dies, drains or comes back, by the dice. One that takes work always stays."""
        faults, there = self.config.faults, [seat for seat in self.seats if seat.member is not None]
        for seat in self.seats:
            if seat.member is None and self._random.random() < faults.join:
                self._join(seat)
        ready = [seat for seat in there if not seat.is_draining]
        if len(ready) > 1 and self._random.random() < faults.death:
            self.num_deaths += 1
            self._leave(self._random.choice(there), is_told=not self.config.detect_delay_s)
        elif len(ready) > 1 and self._random.random() < faults.drain:
            self._drain(self._random.choice(ready))
        if self._random.random() < faults.clear and there:
            seat = self._random.choice(there)
            if seat.member is not None:
                seat.member.memory.clear()
        self._at(self.now_s + faults.period_s, self._disturb)

    def _drain(self, seat: Seat) -> None:
        seat.is_draining = True
        for gateway in self.gateways:
            gateway.policy.draining(seat.number)
        if not seat.taken:
            self._leave(seat)

    # -- the books -----------------------------------------------------------------------------------------------------

    def _note(self, what: str, name: str, number: int) -> None:
        self._log.update(f"{self.now_s!r} {what} {name} {number}\n".encode())

    def _check(self) -> None:
        """Every request is in one place, and gateways know of those that are theirs."""
        given: list[list[str]] = [[] for _ in self.gateways]
        for seat in self.seats:
            for name in (*seat.taken, *seat.stranded):
                given[self._homes[name]].append(name)
        num_known = sum(map(len, given)) + len(self._waiting)
        if num_known != self.num_open:
            raise InvariantError(f"check: {self.num_open} requests are open, {num_known} are somewhere")
        for gateway, names in zip(self.gateways, given, strict=True):
            gateway.policy.check(names)

    def _report(self) -> FleetReport:
        for seat in self.seats:
            if seat.member is not None:
                seat.num_prompt_tokens_computed += seat.member.num_prompt_tokens_computed
                seat.busy_s += seat.member.busy_s
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
                MemberFigures(seat.number, seat.num_requests, seat.num_prompt_tokens_computed, seat.busy_s)
                for seat in self.seats
            ),
            log_digest=self._log.hexdigest(),
        )
