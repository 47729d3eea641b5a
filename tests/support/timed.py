"""An oracle whose steps take some time."""

import time

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult


class TimedRunner(OracleRunner):
    """An oracle whose steps take some time."""

    def __init__(self, capacity: Capacity, step_s: float) -> None:
        super().__init__(capacity)
        self._step_s = step_s

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        return super().run(plan, masks)
