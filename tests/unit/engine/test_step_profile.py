"""What a step costs: profiles by hand, from files, and fitted to steps that were timed."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.step import StepPlan, WorkItem
from quire.engine.step_fit import TimedStep, fit_profile
from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import ConfigError, InvariantError
from tests.support.errors import raises_code

TRUE = StepProfile(
    "true",
    answering_s=1e-4,
    context_token_s=1e-7,
    pair_s=1e-8,
    row_points=((0, 0.0), (1, 0.01), (16, 0.02), (64, 0.05), (256, 0.2)),
)


def some_load(random: Random) -> StepLoad:
    num_answering, num_prompt_tokens = random.choice((0, 1, 4, 16, 33)), random.choice((0, 2, 31, 100, 223))
    if not num_answering and not num_prompt_tokens:
        num_answering = 1
    context = random.randrange(2000) * (num_answering + 1)
    return StepLoad(num_answering, num_prompt_tokens, context, num_prompt_tokens * random.randrange(1000))


def test_what_a_plan_costs_is_read_off_its_items() -> None:
    plan = StepPlan(
        1, (), (WorkItem(1, (5,), 9, (1, 2)), WorkItem(2, (1, 2, 3, 4), 8, (3, 4)), WorkItem(3, (7,), 0, (5,)))
    )
    assert StepLoad.of(plan) == StepLoad(2, 4, 10 + 12 + 1, 4 * (8 + 2))
    assert StepLoad.of(plan).num_rows == 6


def test_lines_go_straight_between_points_and_on_behind_the_last() -> None:
    profile = StepProfile("p", row_points=((0, 0.0), (1, 1.0), (3, 2.0), (5, 6.0)))
    took = [profile.duration_s(StepLoad(rows, 0, 0)) for rows in (1, 2, 3, 4, 5, 7)]
    assert took == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert profile.duration_s(StepLoad(4, 0, 0), speed=2.0) == 2.0


@pytest.mark.parametrize("points", [((1, 1.0),), ((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((-1, 0.0), (2, 1.0))])
def test_points_that_do_not_rise_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with raises_code(ConfigError, "invalid_config"):
        StepProfile("p", row_points=points)


def test_a_profile_by_hand_says_so_and_reads_keys_and_values_as_fast_as_told() -> None:
    profile = StepProfile.parse("prompt=1000,answer=50,kv=100,bytes=1e6")
    assert profile.is_by_hand
    assert "not measured" in profile.origin
    assert profile.duration_s(StepLoad(3, 0, 0)) == pytest.approx(0.02)
    assert profile.duration_s(StepLoad(0, 500, 0)) == pytest.approx(0.52)
    assert profile.duration_s(StepLoad(1, 0, 200)) == pytest.approx(0.04)


@pytest.mark.parametrize(
    "given",
    ["prompt=1000", "prompt=x,answer=1", "prompt=1,answer=0", "prompt=1,answer=2,what=3", "=", "prompt=1,answer"],
)
def test_numbers_by_hand_that_mean_nothing_are_refused_with_an_example(given: str) -> None:
    with raises_code(ConfigError, "invalid_config"):
        StepProfile.parse(given)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**TRUE.as_json(), "machine": {"cores": 2}}))
    assert StepProfile.parse(str(file)) == TRUE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profile": []}', '{"profile": {"name": "x", "speed": 1}}'])
def test_a_file_that_is_no_profile_is_refused_with_how_to_make_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with raises_code(ConfigError, "cannot_read_profile"):
        StepProfile.read(file)


def test_costs_are_found_again_from_the_steps_they_made() -> None:
    random = Random(1)
    steps = [TimedStep(load, TRUE.duration_s(load)) for load in (some_load(random) for _ in range(400))]
    found = fit_profile("found", steps)
    assert found.relative_error < 0.02
    for load in (some_load(random) for _ in range(100)):
        assert found.duration_s(load) == pytest.approx(TRUE.duration_s(load), rel=0.1)


def test_noise_of_a_tenth_is_told_as_the_error_and_does_not_move_the_costs() -> None:
    random = Random(2)
    steps = [
        TimedStep(load, TRUE.duration_s(load) * random.choice((0.9, 1.1)))
        for load in (some_load(random) for _ in range(800))
    ]
    found = fit_profile("found", steps)
    assert 0.05 < found.relative_error < 0.15
    ratios = [found.duration_s(load) / TRUE.duration_s(load) for load in (some_load(random) for _ in range(100))]
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.03)


@settings(max_examples=30)  # a fit takes half a second
@given(st.integers(0, 10_000))
def test_more_tokens_never_take_less_time(seed: int) -> None:
    random = Random(seed)
    steps = [TimedStep(some_load(random), random.uniform(0.001, 1.0)) for _ in range(60)]
    found = fit_profile("noise", steps)
    took = [found.duration_s(StepLoad(0, rows, 0)) for rows in range(1, 300, 7)]
    assert took == sorted(took)


def test_too_few_steps_make_no_profile() -> None:
    with raises_code(InvariantError, "invariant_broken"):
        fit_profile("few", [TimedStep(StepLoad(1, 0, 1), 0.1)] * 39)
