"""Uncached tokens in flight."""

from quire.errors import InvariantError
from quire.fleet.routing.member_load import RATE_WINDOW_S, MemberLoads
from tests.support.errors import raises_code


def loads_of(*members: str) -> MemberLoads:
    loads = MemberLoads()
    for member in members:
        loads.join(member)
    return loads


def test_without_reports_own_reservations_are_all_there_is() -> None:
    loads = loads_of("a", "b")
    loads.reserve("r1", "a", 100, 1.0)
    loads.reserve("r2", "a", 10, 2.0)
    assert loads.in_flight_tokens == {"a": 110, "b": 0}
    loads.release("r1")
    loads.release("r1")
    loads.release("unknown")
    assert loads.in_flight_tokens == {"a": 10, "b": 0}


def test_a_report_counts_what_was_made_before_it_and_not_what_was_made_since() -> None:
    loads = loads_of("a")
    for number, at_s in enumerate((1.0, 2.0, 3.0)):
        loads.reserve(f"r{number}", "a", 10**number, at_s)
    loads.report("a", 5000, 2.0)
    assert loads.in_flight_tokens == {"a": 5110}
    assert len(loads.member_of) == 2


def test_what_a_report_counts_is_taken_off_by_the_next_report_alone() -> None:
    loads = loads_of("a")
    loads.reserve("r1", "a", 10, 1.0)
    loads.report("a", 300, 2.0)
    loads.release("r1")
    assert loads.in_flight_tokens == {"a": 300}
    loads.report("a", 290, 3.0)
    assert loads.in_flight_tokens == {"a": 290}


def test_a_report_that_was_overtaken_is_not_heard_nor_one_of_a_member_that_left() -> None:
    loads = loads_of("a")
    loads.report("a", 300, 2.0)
    loads.report("a", 999, 1.0)
    assert loads.in_flight_tokens == {"a": 300}
    loads.report("a", 200, 2.0)
    assert loads.in_flight_tokens == {"a": 200}
    loads.report("b", 5, 2.0)
    assert loads.in_flight_tokens == {"a": 200}


def test_what_other_gateways_have_sent_since_the_newest_report_is_as_much_as_this_one_sends() -> None:
    loads = loads_of("a", "b")
    loads.reserve("r1", "a", 1000, 2.0)
    assert loads.unseen_tokens(2.0, 8) == 0  # nobody has reported: each counts what it sent, and nothing else
    loads.report("a", 1000, 1.5)
    loads.report("b", 0, 1.0)
    assert loads.unseen_tokens(2.0, 8) == 7 * 1000 / RATE_WINDOW_S * 0.5
    assert loads.unseen_tokens(2.0, 1) == 0
    assert loads.unseen_tokens(1.5, 8) == 0
    loads.report("a", 0, 12.0)
    assert loads.unseen_tokens(12.5, 8) < 7 * 1000 / RATE_WINDOW_S * 0.5 / 2  # it was long ago
    loads.reserve("r2", "a", 10**6, 12.5)
    assert loads.unseen_tokens(12.5, 8) > 7 * 10**6 / RATE_WINDOW_S * 0.5


def test_who_leaves_takes_its_reservations_along_and_comes_back_idle() -> None:
    loads = loads_of("a", "b")
    loads.reserve("r1", "a", 10, 1.0)
    loads.reserve("r2", "b", 20, 1.0)
    loads.leave("a")
    loads.release("r1")
    loads.reserve("r1", "b", 1, 1.0)
    assert (loads.in_flight_tokens, len(loads.member_of)) == ({"b": 21}, 2)
    loads.join("a")
    assert loads.in_flight_tokens == {"b": 21, "a": 0}


def test_mistakes_of_the_caller_are_told() -> None:
    loads = loads_of("a")
    loads.reserve("r1", "a", 10, 1.0)
    with raises_code(InvariantError, "reserved_twice"):
        loads.reserve("r1", "a", 10, 1.0)
    with raises_code(InvariantError, "invariant_broken"):
        loads.join("a")
    with raises_code(InvariantError, "invariant_broken"):
        loads.leave("b")
    with raises_code(InvariantError, "member_unknown"):
        loads.reserve("r2", "b", 1, 1.0)
