"""Who gets a place, who gives one up, and what they are told."""

import pytest

from quire.core.request import PriorityClass
from quire.core.scheduling.shares import (
    ACTIVE_WITHIN_S,
    MAX_REFUSALS,
    MAX_RETRY_S,
    MIN_RESERVED,
    UNKNOWN_RETRY_S,
    Bounds,
    Denied,
    Granted,
    Shares,
)
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.errors import QueueFullError, TenantShareError

HIGH, NORMAL, LOW = (one.value for one in PriorityClass)


class Places:
    """Shares whose places are taken as soon as they are found."""

    def __init__(self, bounds: Bounds) -> None:
        self.shares = Shares(bounds)
        self.now_s = 0.0
        self.displaced: list[str] = []
        self._number = 0

    def ask(self, tenant: str, kind: str = "", *, has_reservation: bool = False) -> Granted | Denied:
        room = self.shares.request_place(tenant, kind, self.now_s, has_reservation=has_reservation)
        if isinstance(room, Denied):
            return room
        self._number += 1
        name = f"{tenant}{self._number}"
        if room.displaced_name is not None:
            self.shares.give_back(room.displaced_name)
            self.displaced.append(room.displaced_name)
        if room.has_reservation:
            self.shares.take_promised(name, tenant, self.now_s)
        else:
            self.shares.take(name, tenant, kind)
        return room

    def fill(self, tenant: str, count: int, kind: str = "") -> list[str]:
        """Until it is refused; the names of those that were let in."""
        return [f"{tenant}{self._number}" for _ in range(count) if isinstance(self.ask(tenant, kind), Granted)]


def test_one_tenant_alone_has_all_places_and_then_the_server_is_full() -> None:
    places = Places(Bounds(20))
    assert len(places.fill("a", 30)) == 20
    refused = places.ask("a")
    assert isinstance(refused, Denied)
    assert isinstance(refused.error, QueueFullError)
    assert str(refused.error) == "the queue is full: 20 of at most 20 requests are waiting; try again later"


def test_a_tenant_holds_no_more_than_its_share_among_those_who_asked() -> None:
    places = Places(Bounds(100))
    places.fill("b", 1)
    places.fill("c", 1)
    assert len(places.fill("a", 100)) == 33
    refused = places.ask("a")
    assert isinstance(refused, Denied)
    assert isinstance(refused.error, TenantShareError)
    assert (refused.error.num_requests, refused.error.limit) == (33, 33)


def test_a_share_is_never_less_than_eight_while_there_are_places() -> None:
    places = Places(Bounds(40))
    for other in range(19):
        places.fill(f"other{other}", 1)
    assert len(places.fill("a", 40)) == 8


def test_who_asked_more_than_a_minute_ago_and_holds_nothing_has_no_share() -> None:
    places = Places(Bounds(100))
    (gone,) = places.fill("gone", 1)
    places.fill("stays", 1)
    places.shares.give_back(gone)
    places.now_s = 59.9
    assert len(places.fill("a", 100)) == 33
    places.now_s = 60.0
    assert len(places.fill("a", 100)) == 50 - 33, "one who holds a place has a share, however long ago it asked"
    assert places.shares.tenants == {"stays", "a"}
    places.now_s = 200.0
    places.shares.advance(places.now_s)
    for name in list(places.shares.owners):
        places.shares.give_back(name)
    assert (places.shares.tenants, len(places.shares), places.shares.sharing_weight) == (set(), 0, 0.0)


def test_at_full_places_the_newest_of_whoever_is_furthest_above_its_share_gives_way() -> None:
    places = Places(Bounds(12))
    near, far = places.fill("near", 4), places.fill("far", 8)
    places.fill("new", 1)
    assert places.displaced == [far[-1]]
    places.fill("new", 1)
    assert places.displaced == [far[-1], far[-2]]
    places.fill("new", 2)
    assert places.displaced == [far[-1], far[-2], far[-3], far[-4]]
    refused = places.ask("new")
    assert isinstance(refused, Denied), "all have their share"
    assert isinstance(refused.error, TenantShareError)
    assert near[-1] in places.shares


def test_whoever_keeps_its_place_is_not_displaced_and_another_is() -> None:
    places = Places(Bounds(6))
    names = places.fill("a", 6)
    places.shares.settle(names[-1])
    places.shares.settle(names[-1])
    places.fill("b", 1)
    assert places.displaced == [names[-2]]
    for name in names[:-2]:
        places.shares.settle(name)
    refused = places.ask("b")
    assert isinstance(refused, Denied)
    assert isinstance(refused.error, QueueFullError), "it is below its share, but nobody can go"


def test_with_more_tenants_than_places_each_may_have_one() -> None:
    places = Places(Bounds(4))
    greedy = places.fill("greedy", 4)
    assert [len(places.fill(f"t{at}", 1)) for at in range(5)] == [1, 1, 1, 0, 0]
    assert places.displaced == [greedy[3], greedy[2], greedy[1]]


def test_a_class_that_has_not_used_what_is_kept_for_it_loses_nothing_to_another() -> None:
    places = Places(QueueConfig(40).bounds)
    low = places.fill("a", 4, LOW)
    normal = places.fill("a", 40, NORMAL)
    assert len(normal) == 32
    assert len(places.fill("b", 40, NORMAL)) == 16
    assert places.displaced == normal[:15:-1]
    assert all(name in places.shares for name in low)
    assert len(places.fill("b", 1, HIGH)) == 1, "four places are kept for that"


def test_weights_divide_the_places() -> None:
    places = Places(Bounds(100, weights={"heavy": 3.0}))
    places.fill("light", 1)
    assert (places.shares.share_of("light", ""), places.shares.share_of("heavy", "")) == (100, 75)
    assert len(places.fill("heavy", 100)) == 75
    assert places.shares.share_of("light", "") == 25
    assert len(places.fill("light", 100)) == 24


def test_who_was_promised_a_place_gets_one_beyond_all_bounds_and_keeps_it() -> None:
    places = Places(Bounds(8))
    places.fill("a", 8)
    assert places.ask("a", has_reservation=True) == Granted(has_reservation=True)
    assert (places.shares.num_taken, places.shares.num_promised, len(places.shares)) == (8, 1, 9)
    places.fill("b", 4)
    assert "a9" in places.shares
    assert len(places.displaced) == 4
    places.shares.settle("a9")
    places.shares.give_back("a9")
    assert places.shares.num_promised == 0


@pytest.mark.parametrize(("max_places", "expected"), [(2, MIN_RESERVED), (300, 300)])
def test_promises_are_bounded_too(max_places: int, expected: int) -> None:
    places = Places(Bounds(max_places))
    places.fill("a", max_places)
    told = [places.ask("a", has_reservation=True) for _ in range(400)]
    assert [isinstance(one, Granted) for one in told].count(True) == expected
    assert places.shares.num_taken == max_places


def test_looking_whether_there_is_room_changes_nothing() -> None:
    shares = Shares(Bounds(1))
    assert shares.judge("a", "") == Granted()
    assert shares.tenants == set()
    shares.take("x", "b", "")
    assert shares.judge("a", "") == Denied("a", 1, 1, UNKNOWN_RETRY_S, None)
    assert shares.tenants == {"b"}


def test_only_whom_it_turned_away_lately_a_queue_speaks_of() -> None:
    places = Places(QueueConfig(100).bounds)
    places.fill("b", 1, NORMAL)
    assert places.shares.update_hints() == ()
    names = places.fill("a", 41, NORMAL)
    (told,) = places.shares.update_hints()
    assert (told.tenant, told.kind, told.num_room) == ("a", NORMAL, 0)
    assert str(told.refusal.error).startswith("tenant 'a' has 40 of at most 40 requests waiting")
    for name in names[:3]:
        places.shares.give_back(name)
    (told,) = places.shares.update_hints()
    assert told.num_room == 3, "so many come in before it is told the same again"
    more = places.fill("a", 5, NORMAL)
    assert len(more) == 3
    for name in [*names[3:], *more]:
        places.shares.give_back(name)
    places.shares.advance(ACTIVE_WITHIN_S)
    assert places.shares.update_hints() == (), "it has nothing here and has not asked for a minute"


def test_as_many_verdicts_are_kept_as_a_message_should_hold() -> None:
    places = Places(Bounds(1))
    places.fill("a", 1)
    for at in range(MAX_REFUSALS + 5):
        places.ask(f"t{at}")
    assert [one.tenant for one in places.shares.update_hints()] == [f"t{at}" for at in range(5, MAX_REFUSALS + 5)]


class TestRetry:
    def test_it_goes_by_how_fast_places_came_free(self) -> None:
        places = Places(Bounds(20))
        places.fill("b", 1)
        places.fill("a", 10)
        for at in range(10):
            places.shares.record_departure(3.0 * at)
        places.now_s = 30.0
        refused = places.ask("a")
        assert isinstance(refused, Denied)
        assert refused.retry_after_s == 6, "a place comes free every three seconds, and half of them are others'"

    def test_one_who_has_to_wait_for_all_waits_for_all(self) -> None:
        places = Places(Bounds(4))
        places.fill("a", 4)
        places.shares.take("restored", "a", "")
        for at in range(10):
            places.shares.record_departure(3.0 * at)
        places.now_s = 30.0
        refused = places.ask("a")
        assert isinstance(refused, Denied)
        assert refused.retry_after_s == 6, "two have to go before there is a place"

    def test_it_is_a_second_at_least_and_a_minute_at_most(self) -> None:
        places = Places(Bounds(4))
        places.fill("a", 4)
        assert places.shares.retry_after_s("a", "") == UNKNOWN_RETRY_S
        places.shares.record_departure(0.0)
        assert places.shares.retry_after_s("a", "") == 1
        places.shares.advance(1e6)
        assert places.shares.retry_after_s("a", "") == MAX_RETRY_S

    def test_it_is_as_long_as_what_was_promised_last_has_been_waiting(self) -> None:
        places = Places(Bounds(4))
        places.fill("a", 4)
        places.ask("a", has_reservation=True)
        for now_s, expected in ((1.0, UNKNOWN_RETRY_S), (25.0, 25), (1000.0, MAX_RETRY_S)):
            places.shares.advance(now_s)
            assert places.shares.retry_after_s("a", "") == expected
            assert places.shares.retry_after_s("b", "") == UNKNOWN_RETRY_S

    def test_a_clock_that_goes_back_is_not_heard(self) -> None:
        shares = Shares(Bounds(4))
        shares.record_departure(10.0)
        shares.record_departure(5.0)
        shares.take("x", "a", "")
        assert shares.retry_after_s("a", "") == 1
