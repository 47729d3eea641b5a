"""What fits in how many bytes, and which settings cannot be."""

from typing import Any

import pytest

from quire.backends import memory_plan
from quire.config import ModelSettings
from quire.config.machine import memory_budget_bytes
from quire.errors import ConfigError
from tests.support.errors import raises_code


def decide(budget_bytes: int, **settings: Any) -> memory_plan.MemoryPlan:
    each = memory_plan.PoolBytes(1 << 20)
    return memory_plan.decide(ModelSettings(**settings), budget_bytes, 1 << 30, 100 << 20, each, 8192)


def test_the_pool_is_what_the_budget_leaves() -> None:
    plan = decide(2 << 30)
    rest = (2 << 30) * 0.98 - memory_plan.MARGIN_BYTES - (1 << 30) - (100 << 20)
    assert plan.num_blocks == int(rest // (1 << 20)) - 1
    assert plan.max_sequence_tokens == 8192


def test_a_pool_is_no_larger_than_all_who_run_could_use() -> None:
    assert decide(100 << 30, max_sequence_tokens=64, max_running=3).num_blocks == 6


def test_a_small_pool_shortens_the_longest_sequence() -> None:
    plan = decide((1 << 30) + (300 << 20))
    assert plan.max_sequence_tokens == plan.num_blocks * 32 < 8192


def test_the_line_says_what_fits() -> None:
    line = decide(2 << 30).summary
    assert "2.00 GiB" in line
    assert "27,200 tokens: 3 sequences of 8,192 or 64 of 425" in line


def test_a_budget_that_cannot_be_met_is_refused_with_what_is_needed() -> None:
    with raises_code(ConfigError, "invalid_config"):
        decide(1 << 30)
    with raises_code(ConfigError, "weights_exceed_memory"):
        memory_plan.check_weights_fit(1 << 20, 1 << 30, 0, 0)


def test_half_of_what_is_free_is_the_default() -> None:
    half = memory_budget_bytes(0.5)
    assert 0.8 * half < memory_plan.budget(ModelSettings()) < 1.25 * half


@pytest.mark.parametrize("settings", [
    {"block_size": 0}, {"memory_bytes": 0}, {"max_step_tokens": 64}, {"dtype": "int4"}, {"num_threads": -1},
    {"backend": "gpu"},
])  # fmt: skip
def test_settings_that_break_a_rule_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelSettings(**settings)


MIB = 1 << 20


def decide_states(left_mib: int, slot_mib: int, **settings: Any) -> memory_plan.MemoryPlan:
    """Of so much that is left for blocks of 1 MiB and state slots."""
    budget = int((left_mib * MIB + memory_plan.MARGIN_BYTES) / (1 - memory_plan.MARGIN_SHARE)) + 1
    each = memory_plan.PoolBytes(MIB, slot_mib * MIB)
    return memory_plan.decide(ModelSettings(**settings), budget, 0, 0, each, 8192)


def test_a_plain_model_has_no_slots() -> None:
    plan = decide(2 << 30)
    assert (plan.num_slots, plan.slot_bytes, plan.max_running, plan.states) == (0, 0, 64, "")
    assert plan.summary.endswith("of 425")


def test_slots_are_one_for_each_who_runs_four_to_keep_and_one_more() -> None:
    plan = decide_states(1000, 1, max_running=8)
    assert (plan.num_slots, plan.max_running) == (41, 8)
    assert plan.num_blocks == 1000 - 42 - 1  # slot 0 and the null block take a place, too


def test_states_take_at_most_half_of_what_is_left() -> None:
    plan = decide_states(1000, 10, max_running=16)
    assert (plan.num_slots, plan.max_running) == (49, 16)
    assert plan.num_blocks == 500 - 1


def test_states_take_more_than_half_where_blocks_have_no_use_for_it() -> None:
    plan = decide_states(1000, 10, max_running=16, max_sequence_tokens=256)
    assert plan.num_blocks == 16 * 8
    assert plan.num_slots == 81
    short = decide_states(700, 10, max_running=16, max_sequence_tokens=256)
    assert (short.num_blocks, short.num_slots) == (16 * 8, (700 - 129) // 10 - 1)


def test_too_few_slots_lower_how_many_run_so_that_each_may_keep_one() -> None:
    plan = decide_states(1000, 50, max_running=16)
    assert (plan.num_slots, plan.max_running) == (9, 4)
    assert decide_states(320, 40, max_running=16).max_running == 1


def test_a_budget_without_room_for_three_slots_is_refused_with_what_is_needed() -> None:
    assert decide_states(400, 50, max_running=1, max_sequence_tokens=64).num_slots == 6
    with raises_code(ConfigError, "invalid_config"):
        decide_states(1000, 400, max_running=4)


@pytest.mark.parametrize("tokens", [None, 8192])
def test_a_budget_that_is_raised_as_told_is_enough(tokens: int | None) -> None:
    settings = ModelSettings(max_running=4, max_sequence_tokens=tokens)
    each = memory_plan.PoolBytes(MIB, 100 * MIB)
    with pytest.raises(ConfigError) as told:
        memory_plan.decide(settings, 1 << 30, 1 << 30, 100 * MIB, each, 8192)
    raised = float(str(told.value).partition("raise it to ")[2].partition(" GiB")[0])
    plan = memory_plan.decide(settings, int(raised * (1 << 30)), 1 << 30, 100 * MIB, each, 8192)
    assert plan.num_slots >= memory_plan.MIN_SLOTS
    assert plan.num_blocks >= (tokens or 64) // 32


def test_the_line_names_the_states_that_run_and_those_that_are_kept() -> None:
    plan = decide_states(1000, 1, max_running=8)
    assert plan.summary.endswith(", states 0.04 GiB = 8 running and 32 cached, each 1.0 MiB")
