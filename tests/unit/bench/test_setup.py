"""What load the settings stand for."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.setup import LoadSetup
from quire.errors import ConfigError
from tests.support.errors import raises_code


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        {"timestamp": 1000 * at, "input_length": 2000, "output_length": 48, "hash_ids": [0, at, 7, 8]}
        for at in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_without_a_word_it_is_a_closed_loop_of_distinct_prompts() -> None:
    setup = LoadSetup()
    visits = setup.visits("1")
    assert (len(visits), setup.pace(visits, "1").concurrency, setup.pace(visits, "1").arrivals_s) == (64, 8, None)


@pytest.mark.parametrize(
    ("given", "comes"),
    [
        ({"rate": 4.0}, "poisson"),
        ({"rate": 4.0, "burstiness": 0.2}, "poisson"),
        ({"rate": 4.0, "arrivals": "bursts"}, "bursts"),
        ({"rate": 4.0, "arrivals": "ramp", "ramp_to": 9.0}, "ramp"),
    ],
)
def test_an_open_loop_has_a_moment_for_every_visit(given: dict[str, Any], comes: str) -> None:
    setup = LoadSetup(**given)
    visits = setup.visits("1")
    moments = setup.pace(visits, "1").arrivals_s
    assert setup.arrival_process == comes
    assert moments is not None
    assert len(moments) == 64
    assert list(moments) == sorted(moments)
    assert moments == setup.pace(visits, "1").arrivals_s


def test_a_trace_comes_as_it_was_recorded_and_fits_the_model(trace: str) -> None:
    setup = LoadSetup(trace=trace, speedup=2.0)
    visits = setup.visits("1", max_model_tokens=512)
    assert setup.pace(visits, "1").arrivals_s == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert all(visit.turns[0].num_tokens + visit.turns[0].max_tokens <= 512 for visit in visits)
    assert len(LoadSetup(trace=trace, requests=3).visits("1")) == 3


def test_the_context_given_goes_before_what_the_server_says(trace: str) -> None:
    (first, *_) = LoadSetup(trace=trace, context=100).visits("1", max_model_tokens=512)
    assert first.turns[0].num_tokens + first.turns[0].max_tokens <= 100


def test_sizes_given_go_before_the_workloads_own() -> None:
    (visit, *_) = LoadSetup(workload="shared", prompt_tokens=7, shared_tokens=0, output_tokens=3).visits("1")
    assert (visit.turns[0].num_tokens, visit.turns[0].max_tokens, visit.system) == (7, 3, ())


def test_more_clients_ask_as_often_each() -> None:
    setup = LoadSetup(requests=32, concurrency=8)
    assert [setup.with_concurrency(count).requests for count in (1, 8, 32)] == [4, 32, 128]


@pytest.mark.parametrize(
    ("given", "code", "flag"),
    [
        ({"workload": "quiet"}, "unknown_choice", "workload"),
        ({"prompts": "voice"}, "unknown_choice", "prompts"),
        ({"arrivals": "never"}, "unknown_choice", "arrivals"),
        ({"requests": 0}, "too_low", "requests"),
        ({"shared_tokens": -1}, "too_low", "shared_tokens"),
        ({"rate": 0.0}, "too_low", "rate"),
        ({"rate": float("nan")}, "too_low", "rate"),
        ({"arrivals": "poisson"}, "flag_is_missing", "rate"),
        ({"arrivals": "ramp", "rate": 1.0}, "flag_is_missing", "ramp_to"),
        ({"arrivals": "trace"}, "flag_is_missing", "trace"),
        ({"trace": "x", "output_tokens": 4}, "flag_without_effect", "output_tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(given: dict[str, Any], code: str, flag: str) -> None:
    with raises_code(ConfigError, code) as refused:
        LoadSetup(**given)
    assert refused.value.settings == (flag,)


def test_a_trace_that_cannot_be_read_is_told_as_a_setting() -> None:
    with raises_code(ConfigError, "invalid_trace_file"):
        LoadSetup(trace="/nowhere.csv").visits("1")


def test_of_a_trace_no_workload_is_told(trace: str) -> None:
    record = LoadSetup(trace=trace).as_record()
    assert (record["trace"], record["arrivals"], "workload" in record) == (trace, "trace", False)


def test_a_result_says_how_to_make_it_again() -> None:
    setup = LoadSetup(workload="chat", turns=2, rate=3.0, seed="s")
    record = setup.as_record()
    assert LoadSetup(**record).as_record() == record
    assert (record["arrivals"], record["seed"]) == ("poisson", "s")
