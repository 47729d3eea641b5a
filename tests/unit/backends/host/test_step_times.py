"""What steps take is measured by running some, and by a clock that the test turns."""

from dataclasses import replace

import pytest

from quire.backends.host import worst_step
from quire.backends.host.worst_step import FIRST_SIZES, MAX_MEASURE_S, MORE_SIZES, measure_step_cost
from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.core.step import StepPlan

CAPACITY = Capacity(9, 16, 200, 64, 50, 128)


class Turned:
    """A runner whose steps take as long as the test says; the first one longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each_s: float) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        self._each_s = each_s
        for clock in ("perf_counter", "process_time"):
            monkeypatch.setattr(worst_step, clock, lambda: self.now_s)

    def run(self, plan: StepPlan) -> None:
        (item,) = plan.items
        size = len(item.token_ids)
        assert item.num_drafts == size - 1
        assert len(item.block_ids) * 16 >= size
        self.now_s += self._each_s * (10 + size) * (1 if self.sizes else 50)
        self.sizes.append(size)


def test_every_size_is_timed_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Turned(monkeypatch, 1e-6)
    cost = measure_step_cost(turned.run, CAPACITY)
    assert cost is not None
    assert [size for size, _ in cost.points] == sorted((*FIRST_SIZES, *MORE_SIZES))
    assert cost.points[0][1] == pytest.approx(11e-6), "what the first step takes once does not count"


def test_a_large_model_is_timed_by_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Turned(monkeypatch, MAX_MEASURE_S)
    cost = measure_step_cost(turned.run, CAPACITY)
    assert cost is not None
    assert [size for size, _ in cost.points] == list(FIRST_SIZES)
    assert len(turned.sizes) == 3


def test_nothing_is_timed_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Turned(monkeypatch, 1e-6)
    assert measure_step_cost(turned.run, replace(CAPACITY, max_step_tokens=16)) is not None
    assert max(turned.sizes) == 16
    assert measure_step_cost(turned.run, replace(CAPACITY, max_sequence_tokens=8)) is None
    assert measure_step_cost(turned.run, replace(CAPACITY, num_blocks=1, block_size=4)) is None


def test_a_real_runner_can_be_asked() -> None:
    runner = OracleRunner(CAPACITY)
    assert measure_step_cost(lambda plan: runner.start(plan).wait(), CAPACITY) is not None
