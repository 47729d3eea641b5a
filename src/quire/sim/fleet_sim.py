"""A fleet in one thread: gateways that choose, members that compute, messages that take their time.

    request ─► gateway ─► policy chooses ─► member: real scheduler, real memory ─► first token, last token
                  ▲                            │
                  └── events of blocks, late ──┤
                  └── load reports, old ───────┘

One server is a fleet of one member, whose gateway has nothing to choose. Whatever happens has a moment, and moments are
taken in order from one heap; equal ones in the order they were made. So one seed gives one log.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from random import Random

from quire.core import invariants
from quire.core.block_table import hit_cap, pack_tokens
from quire.core.digests import BlockHasher
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Finished, FirstToken, KVEvent
from quire.errors import CapacityError, InvariantError, RequestError
from quire.sim.fleet_faults import FleetFaults
from quire.sim.fleet_report import FleetReport, MemberReport
from quire.sim.latencies import Latencies, Spread
from quire.sim.member import KEY, Member, MemberSize
from quire.sim.policies import Asked, MakePolicy, Policy
from quire.sim.step_profile import StepProfile
from quire.workload.workload_request import WorkloadRequest

CHECK_EVERY_STEPS = 16
"""Steps of a member between two looks at all its invariants, where that is asked for."""


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
    faults: FleetFaults = FleetFaults()  # noqa: RUF009 - frozen
    seed: int = 0
    is_checked: bool = False
    """Whether invariants are looked at throughout."""


class _Seat:
    """A member's place in the fleet: who sits there may die, and another comes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.member: Member | None = None
        self.life = 0
        """Which member it is that sits here: messages of an earlier one are late."""
        self.is_draining = False
        self.outbox: deque[KVEvent] = deque()
        self.taken: dict[str, WorkloadRequest] = {}
        """What it has been given and has not ended."""
        self.num_requests = 0
        self.num_prompt_tokens_computed = 0
        self.busy_s = 0.0


class FleetSimulation:
    """One run. `run` ends when every request has its last token, or nobody will ever take it, or `latencies` say that
    the rest is not needed."""

    def __init__(
        self, config: FleetConfig, requests: Iterable[WorkloadRequest], latencies: Latencies | None = None
    ) -> None:
        self.config = config
        self.now_s = 0.0
        self.latencies = latencies or Latencies()
        self.gateways: list[Policy] = [
            config.make_policy(Random(f"{config.seed} {at}")) for at in range(config.num_gateways)
        ]
        self.seats = [_Seat(number) for number in range(config.num_members)]
        self._requests: Iterator[WorkloadRequest] = iter(requests)
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._random = Random(f"faults {config.seed}")
        self._log = blake2b(digest_size=16)
        self._hasher = BlockHasher(KEY)
        self._homes: dict[str, int] = {}
        """Which gateway has whose stream."""
        self._produced: dict[str, int] = {}
        """Tokens that requests had when their members died."""
        self._waiting: deque[WorkloadRequest] = deque()
        """Nobody could take these yet."""
        self.num_arrived = self.num_refused = self.num_moves = self.num_deaths = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        for seat in self.seats:
            self._join(seat)
        self._next_arrival()
        if config.faults.period_s:
            self._at(config.faults.period_s, self._disturb)

    def run(self) -> FleetReport:
        """Moment after moment."""
        while self._moments and (self.num_open or self._has_more) and not self.latencies.is_hopeless:
            self.now_s, _, happen = heappop(self._moments)
            happen()
        return self._report()

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not ended."""
        return self.latencies.num_open

    # -- moments -------------------------------------------------------------------------------------------------------

    def _at(self, moment_s: float, happen: Callable[[], None]) -> None:
        heappush(self._moments, (moment_s, next(self._order), happen))

    def _next_arrival(self) -> None:
        asked = next(self._requests, None)
        self._has_more = asked is not None
        if asked is not None:
            self._at(max(asked.arrival_s, self.now_s), lambda: self._arrive(asked))

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
        number = gateway.choose(self._asked(asked), self.now_s)
        if number is None:
            self._waiting.append(asked)
            return
        seat = self.seats[number]
        self._note("sent", asked.name, number)
        if seat.member is None:
            raise InvariantError(f"send: member {number} was chosen for {asked.name}, and every gateway heard it leave")
        try:
            seat.member.submit(asked, self.now_s, self._produced.get(asked.name, 0))
        except (RequestError, CapacityError):
            gateway.ended(asked.name)
            self.num_refused += 1
            self.latencies.dropped(asked.name)
            self._forget(asked.name)
            return
        seat.taken[asked.name] = asked
        seat.num_requests += 1
        if self.config.report_age_s:
            self._report_load(seat, seat.member)
        self._begin(seat)

    def _asked(self, asked: WorkloadRequest) -> Asked:
        return Asked(asked.name, len(asked.prompt), self._names(asked) if self.gateways[0].wants_names else ())

    def _names(self, asked: WorkloadRequest) -> tuple[int, ...]:
        """Of the prompt's blocks, as far as a hit can go."""
        size, hasher = self.config.size.block_size, self._hasher
        digest, packed = hasher.root(self.config.size.namespace(asked.tenant)), pack_tokens(asked.prompt)
        names = []
        for at in range(hit_cap(len(asked.prompt), size)):
            digest = hasher.child(digest, packed[at * 4 * size : (at + 1) * 4 * size])
            names.append(name_of(digest))
        return tuple(names)

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            self._send(asked)

    def _forget(self, name: str) -> None:
        del self._homes[name]
        self._produced.pop(name, None)

    # -- members -------------------------------------------------------------------------------------------------------

    def _begin(self, seat: _Seat) -> None:
        member = seat.member
        if member is None or member.under_way is not None:
            return
        took_s = member.begin(self.now_s)
        if took_s is None:
            return
        life = seat.life
        self._at(self.now_s + took_s, lambda: self._end(seat, life))

    def _end(self, seat: _Seat, life: int) -> None:
        member = seat.member
        if member is None or seat.life != life:
            return
        for event in member.end(self.now_s):
            if isinstance(event, FirstToken):
                self._note("first", event.request_id, seat.number)
                self.latencies.began(event.request_id, self.now_s)
                self.num_cached_tokens += event.num_cached_tokens
                self.gateways[self._homes[event.request_id]].computed(event.request_id)
            elif isinstance(event, Finished):
                self._finished(seat, event.request_id)
        self._announce(seat)
        if self.config.report_age_s:
            self._report_load(seat, member)
        if self.config.is_checked and member.scheduler.stats.num_steps % CHECK_EVERY_STEPS == 0:
            invariants.check(member.memory)
            invariants.check_scheduler(member.scheduler)
        self._begin(seat)

    def _finished(self, seat: _Seat, name: str) -> None:
        asked = seat.taken.pop(name)
        self._note("ended", name, seat.number)
        self.latencies.ended(name, asked.max_tokens, self.now_s)
        self.gateways[self._homes[name]].ended(name)
        self._forget(name)
        if seat.is_draining and not seat.taken:
            self._leave(seat)

    def _announce(self, seat: _Seat) -> None:
        """What the step did to blocks, to every gateway, some time later."""
        if not seat.outbox:
            return
        told, life = list(seat.outbox), seat.life
        seat.outbox.clear()
        if self._random.random() < self.config.faults.lost_events:
            return
        self._at(self.now_s + self.config.event_delay_s, lambda: self._heard(seat, life, told))

    def _heard(self, seat: _Seat, life: int, told: list[KVEvent]) -> None:
        if seat.life != life:
            return
        for gateway in self.gateways:
            for event in told:
                if isinstance(event, BlockStored):
                    gateway.stored(seat.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, BlockRemoved):
                    gateway.removed(seat.number, [name_of(digest) for digest in event.digests])
                elif isinstance(event, AllBlocksCleared):
                    gateway.cleared(seat.number)

    # -- who is there --------------------------------------------------------------------------------------------------

    def _join(self, seat: _Seat) -> None:
        seat.life += 1
        seat.is_draining = False
        emit = seat.outbox.append if self.gateways[0].wants_names else None
        seat.member = Member(self.config.size, self.config.profile, emit)
        for gateway in self.gateways:
            gateway.joined(seat.number, self.now_s)
        self._send_waiting()

    def _report_load(self, seat: _Seat, member: Member) -> None:
        """How much waits there now that it has changed, to every gateway, when it is so old."""
        as_of_s, num_tokens, life = self.now_s, member.num_uncomputed_tokens, seat.life

        def arrive() -> None:
            if seat.life == life:
                for gateway in self.gateways:
                    gateway.reported(seat.number, num_tokens, as_of_s)

        self._at(self.now_s + self.config.report_age_s, arrive)

    def _leave(self, seat: _Seat) -> None:
        """Nobody sits here any more; what it had goes on elsewhere, with the tokens it has."""
        member, seat.member = seat.member, None
        if member is None:
            return
        seat.num_prompt_tokens_computed += member.num_prompt_tokens_computed
        seat.busy_s += member.busy_s
        seat.life += 1
        seat.outbox.clear()
        taken, seat.taken = seat.taken, {}
        for gateway in self.gateways:
            gateway.left(seat.number)
        for name, asked in taken.items():
            self._produced[name] = member.num_produced(name)
            self.gateways[self._homes[name]].ended(name)
            self.num_moves += 1
            self._send(asked)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Somebody dies, drains or comes back, by the dice."""
        faults, there = self.config.faults, [seat for seat in self.seats if seat.member is not None]
        for seat in self.seats:
            if seat.member is None and self._random.random() < faults.join:
                self._join(seat)
        if len(there) > 1 and self._random.random() < faults.death:
            self.num_deaths += 1
            self._leave(self._random.choice(there))
        elif len(there) > 1 and self._random.random() < faults.drain:
            self._drain(self._random.choice(there))
        if self._random.random() < faults.clear and there:
            seat = self._random.choice(there)
            if seat.member is not None:
                seat.member.memory.clear()
        self._at(self.now_s + faults.period_s, self._disturb)

    def _drain(self, seat: _Seat) -> None:
        seat.is_draining = True
        for gateway in self.gateways:
            gateway.draining(seat.number)
        if not seat.taken:
            self._leave(seat)

    # -- the books -----------------------------------------------------------------------------------------------------

    def _note(self, what: str, name: str, number: int) -> None:
        self._log.update(f"{self.now_s!r} {what} {name} {number}\n".encode())

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
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.latencies.num_output_tokens,
            simulated_s=self.now_s,
            ttft_s=Spread.of(self.latencies.ttft_s),
            tpot_s=Spread.of(self.latencies.tpot_s),
            members=tuple(
                MemberReport(seat.number, seat.num_requests, seat.num_prompt_tokens_computed, seat.busy_s)
                for seat in self.seats
            ),
            log_digest=self._log.hexdigest(),
        )


def name_of(digest: bytes) -> int:
    """A router's name for a block: here all members share a key, so that the digest will do."""
    return int.from_bytes(digest[:8]) >> 1
