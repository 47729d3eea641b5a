"""Objectives are read strictly, and a percentile allows exactly as many misses as it says."""

from math import nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.sim.fleet.report import FleetReport, Spread
from quire.sim.planning.objectives import PERCENTS, LatencyLimit, LatencyObjective
from tests.support.errors import raises_code


def report(ttft_s: float = 0.0, tpot_s: float = 0.0, num_refused: int = 0, num_lost: int = 0) -> FleetReport:
    ttft, tpot = (Spread(one, one, one, one) for one in (ttft_s, tpot_s))
    return FleetReport(9, num_refused, num_lost, 0, 0, 0, 9, 0, 9, 1.0, ttft, tpot, (), "")


def test_units_and_percentiles_are_read() -> None:
    objective = LatencyObjective.parse("ttft_p95=2s, tpot_p50=80ms,ttft_p99=2.5s")
    assert [(one.name, one.limit_s) for one in objective.limits] == [
        ("ttft_p95", 2.0),
        ("tpot_p50", 0.08),
        ("ttft_p99", 2.5),
    ]
    assert objective.words == "TTFT p95 at most 2 s, TPOT p50 at most 80 ms, TTFT p99 at most 2.5 s"


@pytest.mark.parametrize(
    "given",
    [
        *("", "ttft", "ttft_p95", "ttft_p95=", "ttft_p95=2", "ttft_p95=2m", "ttft_p80=2s", "itl_p95=2s"),
        *("ttft_p95=-2s", "ttft_p95=2s,", "ttft_p95=nans", "TTFT_p95=2s", "ttft_p95=1e3s", "ttft_p95=²s"),
    ],
)
def test_anything_else_is_refused_with_the_rule_and_what_was_given(given: str) -> None:
    with raises_code(ConfigError, "invalid_objective"):
        LatencyObjective.parse(given)


@pytest.mark.parametrize("given", ["ttft_p95=0s", "ttft_p95=86401s"])
def test_a_limit_of_no_time_or_of_days_is_refused(given: str) -> None:
    with raises_code(ConfigError, "invalid_time_limit"):
        LatencyObjective.parse(given)


def test_one_percentile_twice_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        LatencyObjective.parse("ttft_p95=2s,ttft_p95=3s")


def test_a_refused_or_lost_request_is_a_miss_however_quick_the_others_are() -> None:
    objective = LatencyObjective.parse("ttft_p95=2s,tpot_p95=80ms")
    assert objective.misses(report(ttft_s=2.0, tpot_s=0.08)) == ()
    assert objective.misses(report(num_refused=2)) == ("2 requests rejected",)
    assert objective.misses(report(num_lost=1)) == ("1 requests unfinished",)
    assert objective.misses(report(ttft_s=3.0, tpot_s=0.1)) == ("TTFT p95 is 3 s", "TPOT p95 is 100 ms")


@given(st.integers(1, 500), st.sampled_from(PERCENTS))
def test_as_many_may_miss_as_leave_the_percentile_where_it_is(num_values: int, percent: int) -> None:
    limit = LatencyLimit("ttft", percent, 1.0)
    allowed = limit.num_allowed(num_values)

    def spread(num_missed: int) -> float:
        values = [1.0] * (num_values - num_missed) + [nextafter(1.0, 2.0)] * num_missed
        found: float = getattr(Spread.of(values), f"p{percent}")
        return found

    assert spread(allowed) <= limit.limit_s
    assert spread(allowed + 1) > limit.limit_s
