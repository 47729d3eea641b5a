"""The parts of a router beside plain references, whatever comes in whatever order."""

from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import InvariantError
from quire.fleet.routing.block_index import UNCONFIRMED_S, BlockIndex
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import Assignment, Membership, MemberState, Transition
from tests.support.fleet.router_invariants import holders_of, is_swept, num_unconfirmed

MEMBERS = ("a", "b", "c")
MAX_DEPTH = 4
Path = tuple[int, ...]
PATHS: list[Path] = [path for depth in range(1, MAX_DEPTH + 1) for path in product((0, 1), repeat=depth)]
NAMES = {path: number for number, path in enumerate(PATHS, start=1)}

members = st.sampled_from(MEMBERS)
paths = st.sampled_from(PATHS)
seconds = st.sampled_from((0.0, 1.0, UNCONFIRMED_S / 2, UNCONFIRMED_S))


def names_on(path: Path) -> tuple[int, ...]:
    return tuple(NAMES[path[: depth + 1]] for depth in range(len(path)))


class IndexMachine(RuleBasedStateMachine):
    """The index beside sets of paths, in four shards, and swept two entries at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(num_shards=4, swept_at_once=2)
        self.now_s = 0.0
        self.confirmed: dict[str, set[Path]] = {}
        self.believed: dict[str, dict[Path, float]] = {}

    @rule(member=members)
    def join_or_leave(self, member: str) -> None:
        if member in self.confirmed:
            self.index.leave(member)
            del self.confirmed[member], self.believed[member]
        else:
            self.index.join(member)
            self.confirmed[member], self.believed[member] = set(), {}

    @rule(member=members, path=paths, first=st.integers(0, MAX_DEPTH))
    def stored(self, member: str, path: Path, first: int) -> None:
        held = self.confirmed.get(member, set())
        while first and path[:first] not in held:
            first -= 1  # parents come first
        self.index.add_blocks(member, names_on(path)[first:])
        for depth in range(first, len(path)):
            held.add(path[: depth + 1])
            self.believed.get(member, {}).pop(path[: depth + 1], None)

    @rule(member=members, pick=st.integers(0, 100))
    def removed_leaf_first(self, member: str, pick: int) -> None:
        held = self.confirmed.get(member, set(PATHS))  # late events of one that left as well
        leaves = sorted(path for path in held if not {(*path, 0), (*path, 1)} & held)
        if leaves:
            leaf = leaves[pick % len(leaves)]
            self.index.remove_blocks(member, [NAMES[leaf]])
            held.discard(leaf)
            self.believed.get(member, {}).pop(leaf, None)

    @rule(member=members, path=paths)
    def removed_what_is_believed_alone(self, member: str, path: Path) -> None:
        if path not in self.confirmed.get(member, ()):
            self.index.remove_blocks(member, [NAMES[path]])
            self.believed.get(member, {}).pop(path, None)

    @rule(member=members)
    def cleared(self, member: str) -> None:
        self.index.clear_blocks(member)
        if member in self.confirmed:
            self.confirmed[member], self.believed[member] = set(), {}

    @rule(member=members, path=paths)
    def optimistic(self, member: str, path: Path) -> None:
        self.index.expect_blocks(member, names_on(path), self.now_s)
        if member in self.believed:
            self.believed[member] |= {path[:depth]: self.now_s + UNCONFIRMED_S for depth in range(1, len(path) + 1)}

    @rule(member=members, path=paths, ago_s=seconds)
    def withdraw(self, member: str, path: Path, ago_s: float) -> None:
        self.index.withdraw_expected(member, names_on(path), self.now_s - ago_s)
        believed = self.believed.get(member, {})
        for depth in range(1, len(path) + 1):
            if believed.get(path[:depth]) == self.now_s - ago_s + UNCONFIRMED_S:
                del believed[path[:depth]]

    @rule(later_s=seconds)
    def wait(self, later_s: float) -> None:
        self.now_s += later_s

    @rule()
    def sweep_a_little(self) -> None:
        before = num_unconfirmed(self.index)
        self.index.sweep(self.now_s)
        assert before - num_unconfirmed(self.index) <= 2, "it is bounded"
        for member, believed in self.believed.items():
            for path, until_s in list(believed.items()):
                if member not in holders_of(self.index, NAMES[path]):
                    assert until_s <= self.now_s, "it was taken back too early"
                    del believed[path]
                elif until_s <= self.now_s and NAMES[path] not in self.index.holders[member].unconfirmed:
                    del believed[path]

    @rule()
    def sweep_all(self) -> None:
        for _ in range(200):
            self.index.sweep(self.now_s)
        assert is_swept(self.index)
        for believed in self.believed.values():
            for path in [path for path, until_s in believed.items() if until_s <= self.now_s]:
                del believed[path]
        assert len(self.index) == len(set().union(*self.confirmed.values()))
        assert num_unconfirmed(self.index) == sum(map(len, self.believed.values()))

    @invariant()
    def who_holds_what_is_as_in_the_sets(self) -> None:
        for path, name in NAMES.items():
            held_by = {one for one in self.confirmed if path in self.confirmed[one] or path in self.believed[one]}
            assert set(holders_of(self.index, name)) == held_by

    @invariant()
    def depths_are_as_in_the_sets(self) -> None:
        for path in PATHS[-(2**MAX_DEPTH) :]:
            found = self.index.depths(names_on(path))
            for member in MEMBERS:
                assert found.get(member, 0) in self.possible_depths(member, path), (member, path)
            assert 0 not in found.values()

    def possible_depths(self, member: str, path: Path) -> set[int]:
        """One, while what is believed is a whole prefix; else any of those where a run of it ends."""
        if member not in self.confirmed:
            return {0}
        believed = self.believed[member]
        depth = sum(path[:depth] in self.confirmed[member] for depth in range(1, len(path) + 1))
        if path[: depth + 1] not in believed or depth == len(path):
            return {depth}
        ends = range(depth + 1, len(path) + 1)
        return {end for end in ends if path[:end] in believed and (end == len(path) or path[: end + 1] not in believed)}


class LoadMachine(RuleBasedStateMachine):
    """Loads beside a list of all reservations, counted anew."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = MemberLoads()
        self.now_s = 0.0
        self.reports: dict[str, tuple[int, float] | None] = {}
        self.reserved: dict[str, tuple[str, int, float]] = {}
        self.number = 0

    @rule(member=members)
    def join_or_leave(self, member: str) -> None:
        if member in self.reports:
            self.loads.leave(member)
            del self.reports[member]
            self.reserved = {name: one for name, one in self.reserved.items() if one[0] != member}
        else:
            self.loads.join(member)
            self.reports[member] = None

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), num_tokens=st.integers(0, 5))
    def reserve(self, data: st.DataObject, num_tokens: int) -> None:
        member = data.draw(st.sampled_from(sorted(self.reports)))
        self.number += 1
        self.loads.reserve(f"r{self.number}", member, num_tokens, self.now_s)
        self.reserved[f"r{self.number}"] = (member, num_tokens, self.now_s)

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def release_once_or_again(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(1, self.number))}"
        self.loads.release(request_id)
        self.reserved.pop(request_id, None)

    @rule(member=members, num_tokens=st.integers(0, 9), ago_s=st.integers(0, 3))
    def report(self, member: str, num_tokens: int, ago_s: int) -> None:
        as_of_s = self.now_s - ago_s
        self.loads.report(member, num_tokens, as_of_s)
        last = self.reports.get(member)
        if member in self.reports and (last is None or as_of_s >= last[1]):
            self.reports[member] = (num_tokens, as_of_s)
            # What a report counts is the member's to tell from now on.
            self.reserved = {name: one for name, one in self.reserved.items() if one[0] != member or one[2] >= as_of_s}

    @rule()
    def wait(self) -> None:
        self.now_s += 1.0

    @invariant()
    def in_flight_is_the_report_and_what_was_reserved_since(self) -> None:
        expected = {}
        for member, report in self.reports.items():
            own = sum(num_tokens for owner, num_tokens, _ in self.reserved.values() if owner == member)
            expected[member] = own + (0 if report is None else report[0])
        assert self.loads.in_flight_tokens == expected
        assert len(self.loads.member_of) == len(self.reserved)


JOINING, READY, SUSPECT, DRAINING, GONE = MemberState
SUSPECT_S, GONE_S = 4.5, 10.0


class MembershipMachine(RuleBasedStateMachine):
    """Membership beside a table of states; whatever the table does not allow must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(SUSPECT_S, GONE_S)
        self.now_s = 0.0
        self.state = dict.fromkeys(MEMBERS, GONE)
        self.beat_s: dict[str, float] = {}
        self.epoch = dict.fromkeys(MEMBERS, 0)
        self.open: dict[str, list[Assignment]] = {member: [] for member in MEMBERS}
        self.past: list[Assignment] = []

    def become(self, member: str, state: MemberState) -> Transition:
        told = Transition(member, self.epoch[member], self.state[member], state)
        self.state[member] = state
        if state is GONE:
            self.past += self.open[member]
            self.open[member] = []
        return told

    @rule(member=members)
    def join(self, member: str) -> None:
        if self.state[member] is not GONE:
            with pytest.raises(InvariantError):
                self.membership.join(member, self.now_s)
            return
        assignment = self.membership.join(member, self.now_s)
        assert assignment.epoch > max(self.epoch.values())
        self.epoch[member], self.state[member], self.beat_s[member] = assignment.epoch, JOINING, self.now_s

    @rule(member=members)
    def ready(self, member: str) -> None:
        if self.state[member] is not JOINING:
            with pytest.raises(InvariantError):
                self.membership.mark_ready(member, self.now_s)
            return
        self.beat_s[member] = self.now_s
        assert self.membership.mark_ready(member, self.now_s) == self.become(member, READY)

    @rule(member=members)
    def beat(self, member: str) -> None:
        told = self.membership.record_heartbeat(member, self.now_s)
        self.beat_s[member] = self.now_s
        assert told == (self.become(member, READY) if self.state[member] is SUSPECT else None)

    @rule(member=members)
    def doubt(self, member: str) -> None:
        if self.state[member] is GONE:
            with pytest.raises(InvariantError):
                self.membership.mark_suspect(member)
            return
        told = self.membership.mark_suspect(member)
        assert told == ((self.become(member, SUSPECT),) if self.state[member] is READY else ())

    @rule(member=members)
    def drain(self, member: str) -> None:
        if self.state[member] in (GONE, DRAINING):
            with pytest.raises(InvariantError):
                self.membership.drain(member)
            return
        told = self.membership.drain(member)
        expected = [self.become(member, DRAINING)]
        if not self.open[member]:
            expected.append(self.become(member, GONE))
        assert list(told) == expected

    @rule(member=members)
    def leave(self, member: str) -> None:
        if self.state[member] is GONE:
            with pytest.raises(InvariantError):
                self.membership.leave(member)
            return
        assert self.membership.leave(member) == self.become(member, GONE)

    @rule(later_s=st.sampled_from((0.5, 2.0, SUSPECT_S, GONE_S, SUSPECT_S + GONE_S)))
    def advance(self, later_s: float) -> None:
        self.now_s += later_s
        told = set(self.membership.advance(self.now_s))
        expected = set()
        for member in MEMBERS:
            silent_s = self.now_s - self.beat_s.get(member, 0.0)
            if self.state[member] is READY and silent_s >= SUSPECT_S:
                expected.add(self.become(member, SUSPECT))
            limit_s = SUSPECT_S if self.state[member] is DRAINING else SUSPECT_S + GONE_S
            if self.state[member] is not GONE and silent_s >= limit_s:
                expected.add(self.become(member, GONE))
        assert told == expected

    @rule(member=members)
    def assign(self, member: str) -> None:
        if self.state[member] is not READY:
            with pytest.raises(InvariantError):
                self.membership.assign(member)
            return
        assignment = self.membership.assign(member)
        assert assignment == Assignment(member, self.epoch[member])
        self.open[member].append(assignment)

    @rule(member=members)
    def unassign(self, member: str) -> None:
        if self.state[member] is GONE:
            return
        if not self.open[member]:
            with pytest.raises(InvariantError):
                self.membership.unassign(Assignment(member, self.epoch[member]))
            return
        told = self.membership.unassign(self.open[member].pop())
        is_last = self.state[member] is DRAINING and not self.open[member]
        assert told == ((self.become(member, GONE),) if is_last else ())

    @rule()
    def unassign_of_the_past(self) -> None:
        for assignment in self.past:
            assert self.membership.unassign(assignment) == ()

    @invariant()
    def all_is_as_in_the_table(self) -> None:
        for member in MEMBERS:
            assert self.membership.state_of(member) is self.state[member]
            assert self.membership.num_open(member) == len(self.open[member])
            current = Assignment(member, self.epoch[member])
            assert self.membership.is_current(current) == (self.state[member] is not GONE)
        ready = {one: Assignment(one, self.epoch[one]) for one in MEMBERS if self.state[one] is READY}
        assert self.membership.ready_members == ready
        assert not any(map(self.membership.is_current, self.past))


QUICK = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestIndex = IndexMachine.TestCase
TestIndex.settings = QUICK
TestLoad = LoadMachine.TestCase
TestLoad.settings = QUICK
TestMembership = MembershipMachine.TestCase
TestMembership.settings = QUICK
