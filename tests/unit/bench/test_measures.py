"""Figures from outcomes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.measures import Objective, busiest_second, max_concurrent, metrics_of, percentile
from quire.bench.outcome import Run
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.unit.bench.outcomes import outcome

KEYS = """
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms
p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms
mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
"""


def test_the_names_are_those_the_fields_scripts_read() -> None:
    assert set(KEYS.split()) <= metrics_of(Run(0.0, 1.0, (outcome(0.0, [0.5]),))).keys()


def test_latencies_are_what_their_names_say() -> None:
    run = Run(0.0, 2.0, (outcome(0.0, [0.1, 0.2, 0.4], output_tokens=4), outcome(0.5, [0.8])))
    figures = metrics_of(run)
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["median_tpot_ms"] == pytest.approx(100.0)  # the single token is left out
    assert figures["mean_itl_ms"] == pytest.approx(150.0)
    assert figures["mean_e2el_ms"] == pytest.approx(350.0)
    assert figures["output_throughput"] == pytest.approx(2.5)
    assert figures["total_token_throughput"] == pytest.approx(12.5)


def test_failures_are_counted_by_kind_and_kept_out_of_the_figures() -> None:
    bad = outcome(0.0, [], error="http 503")
    figures = metrics_of(Run(0.0, 1.0, (outcome(0.0, [0.5]), bad, bad)))
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert figures["error_kinds"] == {"http 503": 2}
    assert figures["total_output_tokens"] == 1


def test_nothing_completed_has_no_latency() -> None:
    figures = metrics_of(Run(0.0, 0.0, (outcome(0.0, [], error="connect"),)), Objective(ttft_ms=1.0))
    assert figures["median_ttft_ms"] is None
    assert (figures["output_throughput"], figures["request_goodput"]) == (0.0, 0.0)


def test_goodput_counts_who_kept_every_limit() -> None:
    run = Run(0.0, 2.0, (outcome(0.0, [0.1, 0.2]), outcome(0.0, [0.1, 0.9]), outcome(0.0, [0.5, 0.6])))
    assert metrics_of(run, Objective.parse(["ttft:200", "tpot:150"]))["request_goodput"] == 0.5
    assert metrics_of(run)["request_goodput"] is None


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "speed:3"])
def test_an_objective_that_is_none_is_refused(word: str) -> None:
    with raises_code(ConfigError, "invalid_config"):
        Objective.parse([word])


def test_cached_tokens_are_a_share_of_the_prompts_of_those_who_were_told() -> None:
    run = Run(0.0, 1.0, (outcome(0.0, [0.5], cached_tokens=8), outcome(0.0, [0.5])))
    figures = metrics_of(run)
    assert (figures["total_cached_tokens"], figures["cached_token_share"]) == (8, 0.8)


def test_each_class_has_its_figures() -> None:
    run = Run(0.0, 1.0, (outcome(0.0, [0.5], kind="person"), outcome(0.0, [0.9], kind="job")))
    by_kind = metrics_of(run)["by_kind"]
    assert by_kind["person"]["median_ttft_ms"] == pytest.approx(500.0)
    assert by_kind["job"]["median_ttft_ms"] == pytest.approx(900.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(numbers: list[float], percent: float) -> None:
    assert percentile(sorted(numbers), percent) == pytest.approx(float(np.percentile(numbers, percent)), abs=1e-6)


def test_back_to_back_is_not_at_once() -> None:
    assert max_concurrent([(0.0, 1.0), (1.0, 2.0)]) == 1
    assert max_concurrent([(0.0, 1.5), (1.0, 2.0), (1.2, 1.3)]) == 3
    assert max_concurrent([]) == 0


def test_an_answer_of_tokens_without_text_has_no_event_and_breaks_no_sum() -> None:
    assert busiest_second([outcome(0.0, [], output_tokens=1), outcome(0.0, [0.1])]) == 1.0


def test_the_busiest_second_counts_tokens_not_events() -> None:
    assert busiest_second([outcome(0.0, [0.1, 0.2, 1.5], output_tokens=6)]) == 4.0


def test_a_client_that_is_late_says_so() -> None:
    late = outcome(0.5, [0.8], due_s=0.3)
    assert metrics_of(Run(0.0, 1.0, (late,)))["median_client_lateness_ms"] == pytest.approx(200.0)
