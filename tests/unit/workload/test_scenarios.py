"""Workloads are the same for the same seed, on any machine."""

from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pstdev

import pytest

from quire.workload import arrivals
from quire.workload.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_asks_in_order_of_arrival(name: str) -> None:
    asks = [list(SCENARIOS[name].requests(Random(5), 50)) for _ in range(2)]
    assert asks[0] == asks[1]
    assert [ask.arrival_s for ask in asks[0]] == sorted(ask.arrival_s for ask in asks[0])
    assert len({ask.name for ask in asks[0]}) == 50
    assert all(ask.prompt and min(ask.prompt) >= 1 and ask.max_tokens >= 1 for ask in asks[0])


@pytest.mark.parametrize(
    "moments",
    [
        arrivals.steady(10.0),
        arrivals.poisson(Random(1), 10.0),
        arrivals.bursts(Random(1), 10.0, 5.0),
        arrivals.gamma(Random(1), 10.0, 0.3),
        arrivals.ramp(Random(1), 10.0, 10.0, 60.0),
    ],
)
def test_arrivals_keep_their_mean_rate(moments: object) -> None:
    taken = list(islice(moments, 4000))  # type: ignore[call-overload]
    assert taken == sorted(taken)
    assert 300.0 < taken[-1] < 520.0


def test_at_once_means_at_once() -> None:
    assert list(islice(arrivals.at_once(), 3)) == [0.0, 0.0, 0.0]


def test_a_ramp_starts_at_one_rate_and_ends_at_the_other() -> None:
    taken = list(islice(arrivals.ramp(Random(3), 2.0, 20.0, 100.0), 3000))
    early = sum(moment_s < 10.0 for moment_s in taken)
    late = sum(110.0 <= moment_s < 120.0 for moment_s in taken)
    assert 10 <= early <= 50
    assert 150 <= late <= 250


def test_a_small_burstiness_makes_clumps() -> None:
    def spread(burstiness: float) -> float:
        taken = list(islice(arrivals.gamma(Random(2), 10.0, burstiness), 2000))
        gaps = [later - sooner for sooner, later in pairwise(taken)]
        return pstdev(gaps) / fmean(gaps)

    assert spread(0.1) > 2.0
    assert 0.8 < spread(1.0) < 1.2
    assert spread(10.0) < 0.5


@pytest.mark.parametrize("mean_size", [1.0, 2.0, 8.0])
def test_bursts_keep_the_rate_they_were_asked_for(mean_size: float) -> None:
    arrived = takewhile(lambda moment_s: moment_s < 50_000, arrivals.bursts(Random(3), 4.0, mean_size))
    assert sum(1 for _ in arrived) == pytest.approx(4.0 * 50_000, rel=0.03)
