"""Which members there are, and which of them get work. Time is a parameter; nothing is sent here.

    joining ──► ready ◄──► suspect        no heartbeat for a while, or doubted: no new work, until there is one
       │          │            │
       ├──────────┴─────► draining        by request: no new work; it leaves when its last request has ended
       │          │            │
       └──────────┴────────────┴────────► gone

A draining member that falls silent is gone: it was about to leave anyway. One that joins and falls silent is gone after
the time of both. A member that is gone comes back by joining, with a new epoch, so that messages of or to the one
before can be distinguished.
"""

from dataclasses import dataclass
from enum import Enum

from quire.errors import ConfigError, InvariantError

SUSPECT_AFTER_S = 4.5
"""Without a heartbeat. Members send one every second or so."""
GONE_AFTER_S = 30.0
"""As a suspect."""


class MemberState(Enum):
    """The state of a member."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


_NEXT_STATES = {
    MemberState.JOINING: (MemberState.READY, MemberState.DRAINING, MemberState.GONE),
    MemberState.READY: (MemberState.SUSPECT, MemberState.DRAINING, MemberState.GONE),
    MemberState.SUSPECT: (MemberState.READY, MemberState.DRAINING, MemberState.GONE),
    MemberState.DRAINING: (MemberState.GONE,),
}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member as of the moment when it got a request."""

    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Transition:
    """A member has changed its state."""

    member: str
    epoch: int
    before: MemberState
    after: MemberState


class MemberRecord:
    """What is known of a member that is not gone."""

    __slots__ = ("assignment", "last_beat_s", "num_open", "state")

    def __init__(self, assignment: Assignment, now_s: float) -> None:
        self.assignment = assignment
        self.state = MemberState.JOINING
        self.last_beat_s = now_s
        self.num_open = 0
        """Requests that were assigned to it and have neither ended nor moved."""


class Membership:
    """The members of a fleet. Methods that change a member's state return the transitions."""

    def __init__(self, suspect_after_s: float = SUSPECT_AFTER_S, gone_after_s: float = GONE_AFTER_S) -> None:
        if suspect_after_s <= 0 or gone_after_s < 0:
            times = f"{suspect_after_s} and {gone_after_s}"
            raise ConfigError(f"expected suspect_after_s above 0 and gone_after_s of at least 0, got {times}")
        self._suspect_after_s = suspect_after_s
        self._gone_after_s = gone_after_s
        self.records: dict[str, MemberRecord] = {}
        self._last_epoch = 0
        self.ready_members: dict[str, Assignment] = {}
        """Members that get work, in the order in which they became ready. Read only."""

    def state_of(self, member: str) -> MemberState:
        """Its state; gone, if it never joined."""
        record = self.records.get(member)
        return MemberState.GONE if record is None else record.state

    def num_open(self, member: str) -> int:
        """Requests that it has."""
        record = self.records.get(member)
        return 0 if record is None else record.num_open

    def is_current(self, assignment: Assignment) -> bool:
        """Whether it is of the member as it is now. Messages of another epoch are about the past."""
        record = self.records.get(assignment.member)
        return record is not None and record.assignment == assignment

    # -- coming and going ----------------------------------------------------------------------------------------------

    def join(self, member: str, now_s: float) -> Assignment:
        """It is there, and not ready yet. Its epoch is larger than any before."""
        if member in self.records:
            raise InvariantError(f"join: {member!r} is {self.state_of(member).value}; it has to leave first")
        self._last_epoch += 1
        assignment = Assignment(member, self._last_epoch)
        self.records[member] = MemberRecord(assignment, now_s)
        return assignment

    def ready(self, member: str, now_s: float) -> Transition:
        """It has loaded its model and can compute."""
        record = self._record(member)
        if record.state is not MemberState.JOINING:
            raise InvariantError(f"ready: {member!r} is {record.state.value}, not joining")
        record.last_beat_s = max(record.last_beat_s, now_s)
        return self._move(record, MemberState.READY)

    def beat(self, member: str, now_s: float) -> Transition | None:
        """It is alive: a suspect is ready again. Late heartbeats of members that are gone change nothing."""
        record = self.records.get(member)
        if record is None:
            return None
        record.last_beat_s = max(record.last_beat_s, now_s)
        return self._move(record, MemberState.READY) if record.state is MemberState.SUSPECT else None

    def doubt(self, member: str) -> tuple[Transition, ...]:
        """It is alive and cannot compute at this moment: no new work, until there is a heartbeat."""
        record = self._record(member)
        return (self._move(record, MemberState.SUSPECT),) if record.state is MemberState.READY else ()

    def drain(self, member: str) -> tuple[Transition, ...]:
        """It gets no more work, and is gone as soon as it has none."""
        record = self._record(member)
        draining = self._move(record, MemberState.DRAINING)
        return (draining, *self._leave_if_done(record))

    def leave(self, member: str) -> Transition:
        """It is gone: it said goodbye, or its connection broke."""
        return self._move(self._record(member), MemberState.GONE)

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Suspect members that were silent for long, or drop them."""
        found: list[Transition] = []
        for record in tuple(self.records.values()):
            silent_s = now_s - record.last_beat_s
            if silent_s < self._suspect_after_s:
                continue
            if record.state is MemberState.READY:
                found.append(self._move(record, MemberState.SUSPECT))
            is_over = silent_s >= self._suspect_after_s + self._gone_after_s
            if is_over or record.state is MemberState.DRAINING:
                found.append(self._move(record, MemberState.GONE))
        return tuple(found)

    # -- work ----------------------------------------------------------------------------------------------------------

    def assign(self, member: str) -> Assignment:
        """It gets one request more. Only a ready member does."""
        record = self._record(member)
        if record.state is not MemberState.READY:
            raise InvariantError(f"assign: {member!r} is {record.state.value}, not ready", code="member_not_ready")
        record.num_open += 1
        return record.assignment

    def unassign(self, assignment: Assignment) -> tuple[Transition, ...]:
        """The request ended or moved. Of an earlier epoch nothing is open any more."""
        if not self.is_current(assignment):
            return ()
        record = self.records[assignment.member]
        if not record.num_open:
            raise InvariantError(f"unassign: {assignment.member!r} has no open request")
        record.num_open -= 1
        return self._leave_if_done(record)

    def _record(self, member: str) -> MemberRecord:
        record = self.records.get(member)
        if record is None:
            raise InvariantError(f"{member!r} is gone, or was never a member")
        return record

    def _leave_if_done(self, record: MemberRecord) -> tuple[Transition, ...]:
        is_done = record.state is MemberState.DRAINING and not record.num_open
        return (self._move(record, MemberState.GONE),) if is_done else ()

    def _move(self, record: MemberRecord, state: MemberState) -> Transition:
        before, assignment = record.state, record.assignment
        if state not in _NEXT_STATES[before]:
            sentence = f"{assignment.member!r} cannot become {state.value}: it is {before.value}"
            raise InvariantError(sentence, code="invalid_transition")
        record.state = state
        if state is MemberState.READY:
            self.ready_members[assignment.member] = assignment
        else:
            self.ready_members.pop(assignment.member, None)
        if state is MemberState.GONE:
            del self.records[assignment.member]
        return Transition(assignment.member, assignment.epoch, before, state)
