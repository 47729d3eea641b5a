"""The scheduler under any order of operations. The same machine runs longer in `make proof-scheduler`."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.core.scheduler_machine import HybridSchedulerMachine, SchedulerMachine


@pytest.mark.parametrize("machine", [SchedulerMachine, HybridSchedulerMachine])
def test_every_request_gets_its_answer_after_any_order_of_operations(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
