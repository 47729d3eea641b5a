"""Workloads are the same for the same seed, on any machine."""

from itertools import islice
from random import Random

import pytest

from quire.workload import arrivals
from quire.workload.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_asks_in_order_of_arrival(name: str) -> None:
    asks = [list(SCENARIOS[name].asks(Random(5), 50)) for _ in range(2)]
    assert asks[0] == asks[1]
    assert [ask.arrival_s for ask in asks[0]] == sorted(ask.arrival_s for ask in asks[0])
    assert len({ask.name for ask in asks[0]}) == 50
    assert all(ask.prompt and min(ask.prompt) >= 1 and ask.max_tokens >= 1 for ask in asks[0])


@pytest.mark.parametrize(
    "moments",
    [arrivals.steady(10.0), arrivals.poisson(Random(1), 10.0), arrivals.bursts(Random(1), 10.0, 5.0)],
)
def test_arrivals_keep_their_mean_rate(moments: object) -> None:
    taken = list(islice(moments, 4000))  # type: ignore[call-overload]
    assert taken == sorted(taken)
    assert 300.0 < taken[-1] < 520.0


def test_at_once_means_at_once() -> None:
    assert list(islice(arrivals.at_once(), 3)) == [0.0, 0.0, 0.0]
