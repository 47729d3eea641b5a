"""What was told about when to come back."""

from quire.core.promises import KEPT_S, Promises


def test_who_comes_at_the_time_it_was_told_comes_by_promise_and_once() -> None:
    promises = Promises()
    promises.tell("a", 0.0, 1.0, 5)
    assert not promises.come("b", 6.0)
    assert promises.come("a", 6.0)
    assert not promises.come("a", 6.0)


def test_who_comes_early_and_is_refused_again_waits_from_then_on() -> None:
    promises = Promises()
    promises.tell("a", 0.0, 1.0, 5)
    assert not promises.come("a", 5.9)
    promises.tell("a", 5.9, 5.9, 5)
    assert not promises.come("a", 6.0)
    assert promises.come("a", 10.9)


def test_who_comes_early_and_is_let_in_has_still_been_told() -> None:
    promises = Promises()
    promises.tell("a", 0.0, 1.0, 5)
    assert not promises.come("a", 2.0)
    assert promises.come("a", 6.0)


def test_a_refusal_of_what_was_asked_before_does_not_put_a_promise_off() -> None:
    promises = Promises()
    promises.tell("a", 1.0, 1.0, 5)
    promises.tell("a", 0.5, 4.0, 60)
    assert promises.come("a", 6.0)
    promises.tell("a", 7.0, 7.0, 60)
    promises.tell("a", 6.5, 8.0, 5)
    assert promises.come("a", 13.0)


def test_a_promise_is_good_for_as_long_as_the_last_who_was_told_may_take() -> None:
    promises = Promises()
    promises.tell("a", 1.0, 1.0, 1)
    promises.tell("a", 0.0, 1.0 + KEPT_S, 60)
    assert promises.come("a", 61.0 + KEPT_S)


def test_a_promise_that_nobody_claims_is_forgotten() -> None:
    promises = Promises()
    promises.tell("a", 0.0, 0.0, 5)
    assert not promises.come("a", 5.1 + KEPT_S)
    for at in range(100):
        promises.tell(f"t{at}", float(at), float(at), 1)
    assert len(promises) < 70
