"""A verdict that can be trusted: on made-up rounds whose truth is known."""

from random import Random
from typing import Any

import pytest

from quire.bench.compare import compare_records
from quire.verdicts import MIN_PAIRS, SpeedVerdict, interval


def record(throughputs: list[float], **changes: Any) -> dict[str, Any]:
    rounds = [{"output_throughput": one, "median_ttft_ms": 1e3 / one, "failed": 0} for one in throughputs]
    return {"run_id": "r", "machine": {"cores": 2}, "load": {"requests": 8}, "rounds": rounds, **changes}


def drifting(random: Random, factor: float, *, noise: float, num_rounds: int = 10) -> tuple[Any, Any]:
    """Two servers on a machine whose speed drifts by half; rounds scatter by `noise` about it."""
    weather = [100.0 * (1.0 + 0.5 * random.random()) for _ in range(num_rounds)]

    def side(speed: float) -> list[float]:
        return [one * speed * random.lognormvariate(0.0, noise) for one in weather]

    return record(side(1.0)), record(side(factor))


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "no difference"), (0.9, "slower"), (1.1, "faster")])
def test_the_truth_is_told_at_least_nine_times_in_ten(factor: float, verdict: str) -> None:
    random = Random(11)
    told = [compare_records(*drifting(random, factor, noise=0.03)).verdict for _ in range(200)]
    assert told.count(SpeedVerdict(verdict)) >= 180


def test_equal_servers_are_rarely_called_different_however_noisy_the_rounds() -> None:
    random = Random(5)
    told = [compare_records(*drifting(random, 1.0, noise=0.4)).verdict for _ in range(300)]
    assert told.count(SpeedVerdict.NO_DIFFERENCE) >= 280


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = Random(3)
    outside = 0
    for _ in range(600):
        _, low, high = interval([random.gauss(0.0, 1.0) for _ in range(12)], level=0.1)
        outside += not low <= 0.0 <= high
    assert 20 <= outside <= 90


def test_the_interval_of_few_values_is_all_of_them() -> None:
    assert interval([3.0, 1.0, 2.0, 5.0, 4.0, 7.0, 6.0]) == (4.0, 1.0, 7.0)


def test_a_difference_below_the_threshold_is_none() -> None:
    a = record([100.0 + index for index in range(10)])
    b = record([99.0 + index for index in range(10)])
    assert compare_records(a, b).verdict is SpeedVerdict.NO_DIFFERENCE
    assert compare_records(a, b, threshold=0.001).verdict is SpeedVerdict.SLOWER


def test_one_slower_figure_decides_although_another_is_faster() -> None:
    a, b = record([100.0] * 8), record([100.0] * 8)
    for one in b["rounds"]:
        one["output_throughput"], one["median_ttft_ms"] = 120.0, 20.0
    verdicts = {one.figure: one.verdict for one in compare_records(a, b).changes}
    assert verdicts == {"output_throughput": SpeedVerdict.FASTER, "median_ttft_ms": SpeedVerdict.SLOWER}
    assert compare_records(a, b).verdict is SpeedVerdict.SLOWER


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "other"}, "not from the same run"),
        ({"machine": {"cores": 4}}, "not from the same machine"),
        ({"load": {"requests": 9}}, "not from the same load"),
        ({"rounds": None}, "is not a result of"),
        ({"run_id": None}, "is not a result of"),
        ({"rounds": [{"output_throughput": 1.0}]}, "was interrupted"),
    ],
)
def test_files_that_do_not_belong_together_are_not_compared(changes: dict[str, Any], reason: str) -> None:
    comparison = compare_records(record([100.0] * 8), {**record([50.0] * 8), **changes})
    assert comparison.verdict is SpeedVerdict.NOT_COMPARABLE
    assert reason in comparison.reason


def test_too_few_rounds_and_failed_requests_give_no_verdict() -> None:
    few = record([100.0] * (MIN_PAIRS - 1))
    assert "at least 7 rounds" in compare_records(few, few).reason
    good, bad = record([100.0] * 8), record([100.0] * 8)
    bad["rounds"][3]["failed"] = 2
    assert "looks fast" in compare_records(good, bad).reason


def test_rounds_without_figures_give_no_verdict() -> None:
    empty = record([100.0] * 8)
    empty["rounds"] = [{"output_throughput": 0.0, "failed": 0}] * 8
    assert "no metric" in compare_records(empty, empty).reason
