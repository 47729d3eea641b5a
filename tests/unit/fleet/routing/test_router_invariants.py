"""What must hold of a router is looked at, and each thing that is broken on purpose is found."""

from collections.abc import Callable

import pytest

from quire.errors import InvariantError
from quire.fleet.routing.membership import Assignment, MemberState
from quire.fleet.routing.router import RoutedPrompt, Router
from tests.support.errors import raises_code
from tests.support.fleet.router_invariants import check_router

BREAKS: dict[str, Callable[[Router], object]] = {
    "of the past": lambda router: setattr(router.routed["r1"], "assignment", Assignment("a", 99)),
    "counted": lambda router: setattr(router.membership.records["a"], "num_open", 5),
    "which does not have it": lambda router: router.loads.reserve("r5", "b", 1, 0.0),
    "the index know": lambda router: router.index.leave("c"),
    "last choices know": lambda router: router.last_chosen.pop("c"),
    "by their block size": lambda router: router.ready_by_size.clear(),
    "is gone, and still there": lambda router: setattr(router.membership.records["c"], "state", MemberState.GONE),
    "are ready": lambda router: router.membership.ready_members.pop("b"),
    "epochs": lambda router: setattr(router.membership, "last_epoch", 1),
    "neither reserved nor reported": lambda router: router.loads.in_flight_tokens.update(a=-1),
    "reservations of requests": lambda router: router.loads.member_of.update(r7="a"),
    "not 10": lambda router: setattr(router.loads.loads["a"], "num_reserved_tokens", 3),
    "a bit is lost": lambda router: setattr(router.index, "num_bits", 9),
    "a bit is in two states": lambda router: setattr(router.index, "dead_bits", 1),
    "are others by now": lambda router: router.index.masks.update({frozenset("ab"): 4}),
    "would leave without a sweep": lambda router: setattr(router.index.holders["a"], "has_bits_set", False),
    "is not what is noted": lambda router: router.index.holders["a"].unconfirmed.clear(),
    "an entry has the bits 0": lambda router: router.index.confirmed[0].update({1024: 0}),
    "a bit that is free": lambda router: router.index.confirmed[0].update({1024: 1 << 3}),
}


def a_router() -> Router:
    """Three members, one that has left, a request with a reservation, blocks that are believed and confirmed."""
    router = Router()
    for member in "abcd":
        router.join(member, 4, 0.0)
        router.mark_ready(member, 0.0)
    router.leave("d")
    router.index.add_blocks("b", [11, 12])
    router.choose(RoutedPrompt("r1", 10, {4: (21, 22)}), 1.0, exclude="bc")
    return router


def test_a_sound_router_passes_and_knows_its_requests() -> None:
    router = a_router()
    check_router(router)
    check_router(router, ["r1"])
    with raises_code(InvariantError, "router_inconsistent"):
        check_router(router, ["r1", "r2"])


@pytest.mark.parametrize("told", BREAKS)
def test_what_is_broken_is_found(told: str) -> None:
    router = a_router()
    BREAKS[told](router)
    with pytest.raises(InvariantError, match=told):
        check_router(router)
