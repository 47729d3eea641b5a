"""Who is a member, and who of them gets work."""

import pytest

from quire.errors import ConfigError, InvariantError
from quire.fleet.routing.membership import SUSPECT_AFTER_S, Assignment, Membership, MemberState
from tests.support.errors import raises_code

JOINING, READY, SUSPECT, DRAINING, GONE = MemberState


def ready_at(now_s: float, *members: str) -> Membership:
    membership = Membership(gone_after_s=10.0)
    for member in members:
        membership.join(member, now_s)
        membership.mark_ready(member, now_s)
    return membership


def test_a_member_joins_and_gets_work_once_it_is_ready() -> None:
    membership = Membership()
    membership.join("a", 0.0)
    assert membership.state_of("a") is JOINING
    assert membership.ready_members == {}
    membership.mark_ready("a", 1.0)
    assert membership.ready_members == {"a": Assignment("a", 1)}


def test_without_a_beat_for_four_and_a_half_seconds_it_is_suspect_and_a_beat_brings_it_back() -> None:
    membership = ready_at(0.0, "a", "b")
    membership.record_heartbeat("a", 1.0)
    assert [one.member for one in membership.advance(SUSPECT_AFTER_S)] == ["b"]
    assert set(membership.ready_members) == {"a"}
    assert membership.is_current(Assignment("b", 2)), "it may be heard yet"
    told = membership.record_heartbeat("b", 5.0)
    assert told is not None
    assert (told.old_state, told.new_state) == (SUSPECT, READY)
    assert membership.advance(5.4) == ()


def test_a_beat_that_was_overtaken_does_not_make_it_older() -> None:
    membership = ready_at(0.0, "a")
    membership.record_heartbeat("a", 4.0)
    membership.record_heartbeat("a", 1.0)
    assert membership.advance(8.0) == ()


def test_who_stays_silent_is_gone_and_its_late_beats_bring_nothing_back() -> None:
    membership = ready_at(0.0, "a")
    assert [one.new_state for one in membership.advance(14.4)] == [SUSPECT]
    assert [one.new_state for one in membership.advance(14.5)] == [GONE]
    assert membership.record_heartbeat("a", 14.6) is None
    assert membership.state_of("a") is GONE


def test_one_that_was_not_looked_at_for_long_passes_through_all_states_at_once() -> None:
    assert [one.new_state for one in ready_at(0.0, "a").advance(100.0)] == [SUSPECT, GONE]


def test_who_joins_and_falls_silent_is_gone_and_was_never_suspect() -> None:
    membership = Membership(gone_after_s=10.0)
    membership.join("a", 0.0)
    assert membership.advance(14.4) == ()
    assert [(one.old_state, one.new_state) for one in membership.advance(14.5)] == [(JOINING, GONE)]


def test_a_draining_member_leaves_with_its_last_request() -> None:
    membership = ready_at(0.0, "a")
    first, second = membership.assign("a"), membership.assign("a")
    assert [one.new_state for one in membership.drain("a")] == [DRAINING]
    assert membership.ready_members == {}
    assert membership.unassign(first) == ()
    assert [one.new_state for one in membership.unassign(second)] == [GONE]


def test_one_without_requests_drains_at_once() -> None:
    assert [one.new_state for one in ready_at(0.0, "a").drain("a")] == [DRAINING, GONE]


def test_a_draining_member_that_falls_silent_is_gone() -> None:
    membership = ready_at(0.0, "a")
    assignment = membership.assign("a")
    membership.drain("a")
    assert membership.advance(4.4) == ()
    assert [one.new_state for one in membership.advance(4.5)] == [GONE]
    assert membership.unassign(assignment) == ()


def test_who_comes_back_has_a_new_epoch_and_what_was_said_before_is_the_past() -> None:
    membership = ready_at(0.0, "a")
    old = membership.assign("a")
    membership.leave("a")
    assert not membership.is_current(old)
    new = membership.join("a", 1.0)
    assert new.epoch > old.epoch
    assert (membership.is_current(old), membership.is_current(new)) == (False, True)
    assert membership.unassign(old) == ()
    assert membership.num_open("a") == 0


def test_mistakes_of_the_caller_are_told() -> None:
    membership = ready_at(0.0, "a")
    for wrong in (
        lambda: membership.join("a", 0.0),
        lambda: membership.mark_ready("a", 0.0),
        lambda: membership.mark_ready("b", 0.0),
        lambda: membership.assign("b"),
        lambda: membership.unassign(Assignment("a", 1)),
    ):
        with pytest.raises(InvariantError):
            wrong()
    membership.assign("a")
    membership.drain("a")
    with raises_code(InvariantError, "member_not_ready"):
        membership.assign("a")
    with raises_code(InvariantError, "invalid_transition"):
        membership.drain("a")
    with pytest.raises(ConfigError):
        Membership(suspect_after_s=0.0)
    with pytest.raises(ConfigError):
        Membership(gone_after_s=-1.0)
