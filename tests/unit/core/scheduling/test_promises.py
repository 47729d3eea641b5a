"""What was told about when to come back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduling.shares import RESERVATION_VALID_S, RetryReservations


def test_who_comes_at_the_time_it_was_told_comes_by_promise_and_once() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 5)
    assert not promises.redeem("b", 6.0)
    assert not promises.redeem("a", 5.9)
    assert promises.redeem("a", 6.0)
    assert not promises.redeem("a", 6.0)


def test_who_comes_early_and_is_let_in_has_still_been_told() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 5)
    assert not promises.redeem("a", 2.0)
    assert promises.redeem("a", 6.0)


def test_a_refusal_of_what_was_on_its_way_does_not_put_a_promise_off() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 5)
    promises.reserve("a", 4.0, 60)
    assert promises.redeem("a", 6.0)


def test_whoever_heard_the_last_refusal_has_a_promise_too() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 5)
    promises.reserve("a", 4.0, 10)
    assert promises.redeem("a", 6.0)
    assert not promises.redeem("a", 13.9)
    assert promises.redeem("a", 14.0)
    assert not promises.redeem("a", 15.0)


def test_a_shorter_time_that_is_told_later_is_true_as_well() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 60)
    promises.reserve("a", 2.0, 5)
    assert promises.redeem("a", 7.0)


def test_who_never_stops_asking_is_let_in_once_in_the_time_it_is_told() -> None:
    promises, num_let_in = RetryReservations(), 0
    for tick in range(1000):
        now_s = tick / 10
        if promises.redeem("a", now_s):
            num_let_in += 1
        else:
            promises.reserve("a", now_s, 5)
    assert num_let_in == 100 / 5


def test_a_promise_is_good_for_as_long_as_the_last_who_was_told_may_take() -> None:
    promises = RetryReservations()
    promises.reserve("a", 1.0, 1)
    promises.reserve("a", 1.0 + RESERVATION_VALID_S, 60)
    assert promises.redeem("a", 61.0 + 2 * RESERVATION_VALID_S)


def test_a_promise_that_nobody_claims_is_forgotten() -> None:
    promises = RetryReservations()
    promises.reserve("a", 0.0, 5)
    assert not promises.redeem("a", 5.1 + RESERVATION_VALID_S)
    for at in range(100):
        promises.reserve(f"t{at}", float(at), 1)
    assert len(promises._by_tenant) < 70


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("ask", "refuse")), st.integers(0, 3), st.integers(1, 9)), max_size=30))
def test_whichever_refusal_a_client_goes_by_the_first_retry_and_the_last_are_let_in(
    events: list[tuple[str, int, int]],
) -> None:
    """Refusals overlap with what is on its way, and none of them is in vain: a client that stops may go by any."""
    promises, now_s = RetryReservations(), 0.0
    open_dues: list[float] = []
    for kind, wait_s, retry_after_s in events:
        now_s += wait_s
        if kind == "refuse":
            promises.reserve("a", now_s, retry_after_s)
            open_dues.append(now_s + retry_after_s)
        elif promises.redeem("a", now_s):
            assert min(open_dues) <= now_s, "it was let in before any time it was told"
            open_dues = open_dues[-1:] if len(open_dues) > 1 else []
        else:
            assert not open_dues or min(open_dues) > now_s, "a retry at a time that was told was refused"
    if open_dues:
        assert promises.redeem("a", max(now_s, open_dues[-1])), "the last that was told does not hold"
