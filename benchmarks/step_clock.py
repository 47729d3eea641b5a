"""Where a step's time goes: a stopwatch around every product and every native call of real steps.

What is neither is the **host's**: plan, apply, inputs, the sampler, Python between calls, and small numpy operations.
The watches' own cost is the host's too, so its share is told rather too large than too small.
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
    """Seconds by part, step after step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    _now: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def watched(self, part: str, call: Callable[P, R]) -> Callable[P, R]:
        """The same call, its time added to a part."""
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
        """So much more for this part of the step."""
        self._now[part] += seconds

    def step(self, machine: Machine) -> None:
        """One step of the engine; what no watch saw becomes `host`."""
        self._now.clear()
        started = perf_counter()
        machine.step()
        whole = perf_counter() - started
        seen = dict(self._now)
        self.steps.append({**seen, "step": whole, "host": whole - sum(seen[part] for part in seen if part not in HOST)})

    def shares(self) -> dict[str, float]:
        """Median seconds of each part over all steps."""
        parts = sorted({part for step in self.steps for part in step})
        return {part: median(step.get(part, 0.0) for step in self.steps) for part in parts}

    def host_shares(self) -> list[float]:
        return [step["host"] / step["step"] for step in self.steps]


@contextmanager
def watching(machine: Machine, model: Decoder) -> Iterator[StepClock]:
    """A clock on this engine's native calls, plan and apply, for as long as the block runs."""
    clock = StepClock()
    kernels = extension.kernels()
    found = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")}
    found |= {name: clock.watched(name, found[name]) for name in KERNELS}
    found["compute_step"] = _watched_step(clock, model, found["compute_step"])
    scheduler = machine.engine.scheduler
    with ExitStack() as stack:
        stack.callback(model.time_parts, None)
        for module in (decoder, tiles, sampling):
            stack.enter_context(patch.object(module, "kernels", lambda: SimpleNamespace(**found)))
        for name in HOST:
            stack.enter_context(patch.object(scheduler, name, clock.watched(name, getattr(scheduler, name))))
        yield clock


def _watched_step(clock: StepClock, model: Decoder, call: Callable[[int], None]) -> Callable[[int], None]:
    """The call times its parts itself; what lies between them is told as `between`."""
    seconds = np.zeros(len(PARTS))
    model.time_parts(seconds)

    def timed(address: int) -> None:
        seconds[:] = 0.0
        started = perf_counter()
        call(address)
        whole = perf_counter() - started
        for part, taken in zip(PARTS, seconds.tolist(), strict=True):
            clock.add(part, taken)
        clock.add("between", whole - float(seconds.sum()))

    return timed
