"""The kit for state slots passes for the oracle and for hybrids on the CPU backend, and notices what is broken."""

import pytest

from quire.backends.conformance.harness import ConformanceError
from quire.backends.conformance.states import CHECKS, check_states
from quire.backends.kernels import extension
from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity, PendingStep
from quire.core.step import StepPlan
from tests.support.changed import changed
from tests.support.errors import raises_code
from tests.support.models import architectures
from tests.support.models.models import WatchedRunner, runners_of

CAPACITY = Capacity(48, 8, 1 << 20, 256, 50, 64, num_slots=4)
pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)
SETTINGS = {"memory_bytes": 2 << 30, "max_sequence_tokens": 256, "max_step_tokens": 64, "max_running": 8}


class Broken(WatchedRunner):
    """An oracle that is given another plan."""

    def __init__(self, change: str) -> None:
        super().__init__(OracleRunner(CAPACITY))
        self._change = change

    def start(self, plan: StepPlan) -> PendingStep:
        match self._change:
            case "no copies":
                plan = changed(plan, slot_copies=())
            case "copies in reverse":
                plan = changed(plan, slot_copies=plan.slot_copies[::-1])
            case "cached states first":
                plan = changed(plan, slot_copies=(*plan.slot_copies, *plan.cache_copies), cache_copies=())
            case "one slot":
                items = tuple(changed(item, state_slot=1) for item in plan.items)
                plan = changed(plan, items=items)
        return super().start(plan)


def test_the_oracle_passes() -> None:
    assert len(check_states(lambda: OracleRunner(CAPACITY))) == len(CHECKS)


@pytest.mark.parametrize("change", ["no copies", "copies in reverse", "cached states first", "one slot"])
def test_a_runner_that_moves_states_otherwise_is_noticed(change: str) -> None:
    with pytest.raises(ConformanceError):
        check_states(lambda: Broken(change))


def test_a_runner_without_slots_is_told_so() -> None:
    with raises_code(ConformanceError, "too_few_state_slots"):
        check_states(lambda: OracleRunner(Capacity(48, 8, 1 << 20, 256, 50, 64)))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "lfm2-moe", "granite4"])
def test_hybrids_on_the_cpu_backend_pass(name: str) -> None:
    make = runners_of(architectures.directory(name), **SETTINGS)
    assert len(check_states(make)) == len(CHECKS)
