"""The states of members. The current time is a parameter; this module sends nothing.

    joining ──► ready ◄──► suspect        heartbeat overdue, or the member cannot compute: no new work until a heartbeat
       │          │            │
       ├──────────┴─────► draining        on request: no new work; gone when its last request has ended
       │          │            │
       └──────────┴────────────┴────────► gone

If a draining member's heartbeat is overdue, it is gone. A joining member is gone after `suspect_after_s` plus
`gone_after_s` without a heartbeat. A member that returns joins with a new epoch, which distinguishes it from its
earlier incarnation.
"""

from dataclasses import dataclass
from enum import Enum

from quire.errors import ConfigError, InvariantError

SUSPECT_AFTER_S = 4.5
"""Heartbeat timeout; members send a heartbeat about every second."""
GONE_AFTER_S = 30.0
"""Further time without a heartbeat until a suspect member is gone."""


class MemberState(Enum):
    """The state of a member; see the module's diagram."""

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
    """The member of a request, with the member's epoch at the time of assignment."""

    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Transition:
    """A state change of a member."""

    member: str
    epoch: int
    old_state: MemberState
    new_state: MemberState


class MemberRecord:
    """The record of a member that is not gone."""

    __slots__ = ("assignment", "last_heartbeat_s", "num_open", "state")

    def __init__(self, assignment: Assignment, now_s: float) -> None:
        self.assignment = assignment
        self.state = MemberState.JOINING
        self.last_heartbeat_s = now_s
        self.num_open = 0
        """Requests assigned to the member that have neither ended nor moved."""


class Membership:
    """The members of a fleet and their states. Methods that change a state return the transitions."""

    def __init__(self, suspect_after_s: float = SUSPECT_AFTER_S, gone_after_s: float = GONE_AFTER_S) -> None:
        if suspect_after_s <= 0 or gone_after_s < 0:
            values = f"{suspect_after_s} and {gone_after_s}"
            raise ConfigError(f"expected suspect_after_s above 0 and gone_after_s of at least 0, got {values}")
        self._suspect_after_s = suspect_after_s
        self._gone_after_s = gone_after_s
        self.records: dict[str, MemberRecord] = {}
        self.last_epoch = 0
        self.ready_members: dict[str, Assignment] = {}
        """Members that may get requests, in the order in which they became ready. Read only."""

    def state_of(self, member: str) -> MemberState:
        """Return a member's state; GONE if it never joined."""
        record = self.records.get(member)
        return MemberState.GONE if record is None else record.state

    def num_open(self, member: str) -> int:
        """Return the number of open requests of a member."""
        record = self.records.get(member)
        return 0 if record is None else record.num_open

    def is_current(self, assignment: Assignment) -> bool:
        """Whether the assignment has the member's current epoch."""
        record = self.records.get(assignment.member)
        return record is not None and record.assignment == assignment

    # -- state changes -------------------------------------------------------------------------------------------------

    def join(self, member: str, now_s: float) -> Assignment:
        """Add a member that is not ready yet. Its epoch is larger than all earlier epochs."""
        if member in self.records:
            raise InvariantError(f"join: {member!r} is {self.state_of(member).value}; it has to leave first")
        self.last_epoch += 1
        assignment = Assignment(member, self.last_epoch)
        self.records[member] = MemberRecord(assignment, now_s)
        return assignment

    def mark_ready(self, member: str, now_s: float) -> Transition:
        """Mark a joining member as ready: it has loaded its model."""
        record = self._record(member)
        if record.state is not MemberState.JOINING:
            raise InvariantError(f"ready: {member!r} is {record.state.value}, not joining")
        record.last_heartbeat_s = max(record.last_heartbeat_s, now_s)
        return self._set_state(record, MemberState.READY)

    def record_heartbeat(self, member: str, now_s: float) -> Transition | None:
        """Record a heartbeat: a suspect is ready again. Heartbeats of members that are gone are ignored."""
        record = self.records.get(member)
        if record is None:
            return None
        record.last_heartbeat_s = max(record.last_heartbeat_s, now_s)
        return self._set_state(record, MemberState.READY) if record.state is MemberState.SUSPECT else None

    def mark_suspect(self, member: str) -> tuple[Transition, ...]:
        """Suspect a member that is alive but cannot compute now; it gets no new work until its next heartbeat."""
        record = self._record(member)
        return (self._set_state(record, MemberState.SUSPECT),) if record.state is MemberState.READY else ()

    def drain(self, member: str) -> tuple[Transition, ...]:
        """Assign no new requests to a member; it is gone when it has no open request."""
        record = self._record(member)
        transition = self._set_state(record, MemberState.DRAINING)
        return (transition, *self._remove_if_drained(record))

    def leave(self, member: str) -> Transition:
        """Remove a member that has exited or whose connection is lost."""
        return self._set_state(self._record(member), MemberState.GONE)

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Suspect or remove members whose heartbeat is overdue."""
        transitions: list[Transition] = []
        for record in tuple(self.records.values()):
            silent_s = now_s - record.last_heartbeat_s
            if silent_s < self._suspect_after_s:
                continue
            if record.state is MemberState.READY:
                transitions.append(self._set_state(record, MemberState.SUSPECT))
            is_gone = silent_s >= self._suspect_after_s + self._gone_after_s
            if is_gone or record.state is MemberState.DRAINING:
                transitions.append(self._set_state(record, MemberState.GONE))
        return tuple(transitions)

    # -- requests ------------------------------------------------------------------------------------------------------

    def assign(self, member: str) -> Assignment:
        """Count one more open request of a ready member. Raises InvariantError if it is not ready."""
        record = self._record(member)
        if record.state is not MemberState.READY:
            raise InvariantError(f"assign: {member!r} is {record.state.value}, not ready", code="member_not_ready")
        record.num_open += 1
        return record.assignment

    def unassign(self, assignment: Assignment) -> tuple[Transition, ...]:
        """Count one open request less, because it ended or moved. Assignments of earlier epochs are ignored."""
        if not self.is_current(assignment):
            return ()
        record = self.records[assignment.member]
        if not record.num_open:
            raise InvariantError(f"unassign: {assignment.member!r} has no open request")
        record.num_open -= 1
        return self._remove_if_drained(record)

    def _record(self, member: str) -> MemberRecord:
        record = self.records.get(member)
        if record is None:
            raise InvariantError(f"{member!r} is gone, or was never a member")
        return record

    def _remove_if_drained(self, record: MemberRecord) -> tuple[Transition, ...]:
        is_done = record.state is MemberState.DRAINING and not record.num_open
        return (self._set_state(record, MemberState.GONE),) if is_done else ()

    def _set_state(self, record: MemberRecord, state: MemberState) -> Transition:
        old_state, assignment = record.state, record.assignment
        if state not in _NEXT_STATES[old_state]:
            message = f"{assignment.member!r} cannot become {state.value}: it is {old_state.value}"
            raise InvariantError(message, code="invalid_transition")
        record.state = state
        if state is MemberState.READY:
            self.ready_members[assignment.member] = assignment
        else:
            self.ready_members.pop(assignment.member, None)
        if state is MemberState.GONE:
            del self.records[assignment.member]
        return Transition(assignment.member, assignment.epoch, old_state, state)
