"""What a step costs: a line through what was measured, and how likely a guess must be to pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduling.step_cost import MARGIN, MIN_RELATIVE_COST, StepCost
from quire.errors import ConfigError
from tests.support.errors import raises_code

STAIRS = StepCost(((1, 1.0), (3, 1.2), (5, 2.2)))


@pytest.mark.parametrize(
    ("num_tokens", "price"),
    [(1, 0.1 / 1.0), (2, 0.1 / 1.1), (3, 0.5 / 1.2), (4, 0.5 / 1.7), (5, 0.5 / 2.2), (7, 0.5 / 3.2)],
)
def test_a_price_is_what_the_next_token_adds_over_the_step(num_tokens: int, price: float) -> None:
    assert STAIRS.min_acceptance(num_tokens, 1) == pytest.approx(MARGIN * price)


def test_a_guess_must_pay_for_the_time_of_all_who_share_the_step() -> None:
    assert STAIRS.min_acceptance(3, 4) == pytest.approx(4 * STAIRS.min_acceptance(3, 1))


def test_a_token_that_seems_to_cost_nothing_is_not_believed() -> None:
    assert StepCost(((1, 1.0), (9, 1.0))).min_acceptance(4, 1) == MARGIN * MIN_RELATIVE_COST


def test_where_each_token_costs_its_share_no_guess_pays() -> None:
    assert StepCost(((1, 1.0), (64, 64.0))).min_acceptance(32, 32) >= 1.0


def test_a_larger_step_that_seemed_shorter_is_as_long_as_the_smaller() -> None:
    assert StepCost.from_measurements([(8, 0.9), (1, 1.0), (4, 1.5)]).points == ((1, 1.0), (4, 1.5), (8, 1.5))


@pytest.mark.parametrize("points", [(), ((1, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((1, 0.0), (2, 1.0))])
def test_what_makes_no_line_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with raises_code(ConfigError, "invalid_config"):
        StepCost(points)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10.0), min_size=2), st.integers(1, 99), st.integers(1, 64))
def test_whatever_was_measured_gives_a_price(found: dict[int, float], num_tokens: int, num_sequences: int) -> None:
    assert StepCost.from_measurements(found.items()).min_acceptance(num_tokens, num_sequences) > 0.0
