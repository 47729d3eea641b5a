"""What fits in how many bytes, and which settings cannot be."""

from typing import Any

import pytest

from quire.backends import memory_plan
from quire.config import ModelSettings
from quire.config.machine import share_of_memory_bytes
from quire.errors import ConfigError


def decide(budget_bytes: int, **settings: Any) -> memory_plan.MemoryPlan:
    held, each = memory_plan.HeldBytes(1 << 30, 100 << 20), memory_plan.PoolBytes(1 << 20)
    return memory_plan.decide(ModelSettings(**settings), budget_bytes, held, each, 8192)


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
    line = decide(2 << 30).line
    assert "2.00 GiB" in line
    assert "27,200 tokens: 3 sequences of 8,192 or 64 of 425" in line


def test_a_budget_that_cannot_be_met_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"1\.10 GiB in all, 1\.00 GiB given; raise it to"):
        decide(1 << 30)
    with pytest.raises(ConfigError, match="the memory budget must hold the model"):
        memory_plan.check_weights_fit(1 << 20, 1 << 30, 0, 0)


def test_half_of_what_is_free_is_the_default() -> None:
    half = share_of_memory_bytes(0.5)
    assert 0.8 * half < memory_plan.budget(ModelSettings()) < 1.25 * half


@pytest.mark.parametrize("settings", [
    {"block_size": 0}, {"memory_bytes": 0}, {"max_step_tokens": 64}, {"dtype": "int4"}, {"num_threads": -1},
    {"backend": "gpu"},
])  # fmt: skip
def test_settings_that_break_a_rule_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelSettings(**settings)
