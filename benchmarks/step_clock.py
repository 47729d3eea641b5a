"""Measures the time of the parts of real steps, with timers around every matrix product and native call.

The rest is the **host's** time: plan, apply, inputs, the sampler, Python between calls, and small numpy operations. The
timers themselves count as host time too, so its share is over- rather than underestimated.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np

from quire.backends.cpu import decoder, tiles
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.layers import PARTS
from quire.backends.kernels import extension, sampling
from tests.support.models.models import Machine

P = ParamSpec("P")
R = TypeVar("R")

KERNELS = ("make_tiles", "draw", "exp_totals")
HOST = ("plan", "apply")


@dataclass
class StepClock:
    """Seconds of the parts of each step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    _now: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, part: str, call: Callable[P, R]) -> Callable[P, R]:
        """Return a function that makes the call and adds its time to a part."""
        now = self._now

        @wraps(call)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                now[part] += perf_counter() - started

        return timed

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part of the current step."""
        self._now[part] += seconds

    def step(self, machine: Machine) -> None:
        """Run one step of the engine; time outside all timers becomes `host`."""
        self._now.clear()
        start_s = perf_counter()
        machine.step()
        total_s, parts = perf_counter() - start_s, dict(self._now)
        host_s = total_s - sum(parts[part] for part in parts if part not in HOST)
        self.steps.append({**parts, "step": total_s, "host": host_s})

    def shares(self) -> dict[str, float]:
        """Return the median seconds of each part over all steps."""
        parts = sorted({part for step in self.steps for part in step})
        return {part: median(step.get(part, 0.0) for step in self.steps) for part in parts}

    def host_shares(self) -> list[float]:
        return [step["host"] / step["step"] for step in self.steps]


@contextmanager
def step_timers(machine: Machine, model: Decoder) -> Iterator[StepClock]:
    """Time this engine's native calls, plan and apply while the block runs."""
    clock = StepClock()
    kernels = extension.kernels()
    functions = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")}
    functions |= {name: clock.timed(name, functions[name]) for name in KERNELS}
    functions["compute_step"] = _timed_step(clock, model, functions["compute_step"])
    scheduler = machine.engine.scheduler
    with ExitStack() as stack:
        stack.callback(model.time_parts, None)
        for module in (decoder, tiles, sampling):
            stack.enter_context(patch.object(module, "kernels", lambda: SimpleNamespace(**functions)))
        for name in HOST:
            stack.enter_context(patch.object(scheduler, name, clock.timed(name, getattr(scheduler, name))))
        yield clock


def _timed_step(clock: StepClock, model: Decoder, call: Callable[[int], None]) -> Callable[[int], None]:
    """Time a native step, which times its parts itself; the rest of its time becomes `between`."""
    seconds = np.zeros(len(PARTS))
    model.time_parts(seconds)

    def timed(address: int) -> None:
        seconds[:] = 0.0
        start_s = perf_counter()
        call(address)
        total_s = perf_counter() - start_s
        for part, part_s in zip(PARTS, seconds.tolist(), strict=True):
            clock.add(part, part_s)
        clock.add("between", total_s - float(seconds.sum()))

    return timed
