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


class PacedRunner(OracleRunner):
    """An oracle whose steps take a time for each token that they feed, layer by layer, as a decoder's do."""

    NUM_LAYERS = 24

    def __init__(self, capacity: Capacity, token_s: float) -> None:
        super().__init__(capacity)
        self._token_s = token_s
        self._layers = memoryview(bytearray(8)).cast("Q")

    def count_layers(self, counter: memoryview) -> int:
        self._layers = counter.cast("Q")
        return self.NUM_LAYERS

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        for _ in range(self.NUM_LAYERS):
            time.sleep(num_tokens * self._token_s / self.NUM_LAYERS)
            self._layers[0] += 1
        return super().run(plan, masks)
