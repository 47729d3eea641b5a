"""How many members a fleet needs: pure, so it is tested without any control plane."""

import pytest

from quire.fleet.member.status import MemberStatus
from quire.fleet.ray.registry import desired_members, load_of

ENOUGH = 1000, 8


def status(num_uncomputed_tokens: int = 0, num_running: int = 0) -> MemberStatus:
    return MemberStatus("tcp://127.0.0.1:1", "ready", num_running, 0, num_uncomputed_tokens)


@pytest.mark.parametrize(
    ("one", "load"),
    [(status(), 0.0), (status(500), 0.5), (status(2500, 8), 2.5), (status(0, 8), 1.0), (status(100, 4), 0.5)],
)
def test_a_members_load_is_what_its_work_would_fill(one: MemberStatus, load: float) -> None:
    assert load_of(one, *ENOUGH) == load


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([], 1), ([0.0, 0.0, 0.0], 1), ([0.9], 1), ([1.1], 2), ([2.5, 0.5], 3), ([2.5, 0.6], 4), ([0.1] * 10, 1)],
)
def test_all_loads_together_are_the_members_that_are_needed(loads: list[float], wanted: int) -> None:
    assert desired_members(loads) == wanted


def test_members_that_are_full_of_answers_are_not_taken_away() -> None:
    full = [load_of(status(0, 8), *ENOUGH)] * 3
    assert desired_members(full) == 3
