"""Ratios are judged by the interval over rounds, and rounds are added while it is wide."""

from pathlib import Path

from benchmarks.rounds import MAX_ROUNDS, NUM_LONG_ROUNDS, NUM_ROUNDS, RatioInterval, measured_ratios
from proofs.framework.proof import Proof
from proofs.framework.rounds import judge_ratio


def test_rounds_that_agree_are_ten() -> None:
    assert measured_ratios(lambda: [1.0, 2.0], clock=lambda: 0.0) == [[1.0] * NUM_ROUNDS, [2.0] * NUM_ROUNDS]


def test_rounds_that_differ_are_added_up_to_thirty() -> None:
    ratios = iter([0.5, 2.0] * MAX_ROUNDS)
    assert len(measured_ratios(lambda: [next(ratios)], clock=lambda: 0.0)[0]) == MAX_ROUNDS


def test_rounds_of_over_a_minute_are_seven() -> None:
    ticks = iter(range(0, 100_000, 61))
    assert len(measured_ratios(lambda: [1.0], clock=lambda: next(ticks))[0]) == NUM_LONG_ROUNDS


def test_an_interval_that_reaches_the_bound_holds_and_one_wholly_beyond_it_does_not() -> None:
    assert RatioInterval(1.02, 0.99, 1.05).is_within(at_most=1.0, at_least=None)
    assert not RatioInterval(1.03, 1.01, 1.05).is_within(at_most=1.0, at_least=None)
    assert RatioInterval(0.97, 0.95, 0.99).is_within(at_most=None, at_least=0.98)
    assert not RatioInterval(0.96, 0.95, 0.97).is_within(at_most=None, at_least=0.98)


def test_a_wide_interval_is_judged_by_its_median() -> None:
    wide = RatioInterval(1.1, 0.9, 1.3)
    assert wide.is_wide
    assert not wide.is_within(at_most=1.0, at_least=None)
    assert wide.is_within(at_most=1.2, at_least=None)


def test_a_broken_ratio_is_reported_with_its_interval(tmp_path: Path) -> None:
    proof = Proof("none", "quick", tmp_path)
    judge_ratio(proof, "speed", [0.90 + at / 1000 for at in range(10)], at_least=0.98)
    assert proof.broken == ["speed"]
    assert proof.figures["speed_low"] < proof.figures["speed"] < proof.figures["speed_high"] < 0.98
    assert proof.figures["speed_rounds"] == 10
