"""Where a step's time goes: a stopwatch around every product and every native call of real steps.

What is neither is the **host's**: plan, apply, inputs, the sampler, Python between calls, and small torch operations.
The watches' own cost is the host's too, so its share is told rather too large than too small.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from quire.backends.torch.models.decoder import Decoder
from quire.backends.torch.native import extension
from tests.support.models import Machine

P = ParamSpec("P")
R = TypeVar("R")

PRODUCTS = ("qkv", "out", "gate_up", "down", "head")
KERNELS = ("attention", "rope_write", "add_rms_norm", "silu_mul", "argmax", "make_tiles")
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
    """A clock on this engine's products, native calls, plan and apply, for as long as the block runs."""
    clock = StepClock()
    layers, head = model._layers, model._head
    kernels = extension.kernels()
    found = {name: getattr(kernels, name) for name in dir(kernels) if not name.startswith("_")}
    found |= {name: clock.watched(name, found[name]) for name in KERNELS}
    scheduler = machine.engine.scheduler
    with ExitStack() as stack:
        timed = [
            replace(
                layer,
                qkv=clock.watched("qkv", layer.qkv),
                out=clock.watched("out", layer.out),
                gate_up=clock.watched("gate_up", layer.gate_up),
                down=clock.watched("down", layer.down),
            )
            for layer in layers
        ]
        stack.enter_context(patch.object(model, "_layers", timed))
        stack.enter_context(patch.object(model, "_head", clock.watched("head", head)))
        stack.enter_context(patch.object(extension, "kernels", lambda: SimpleNamespace(**found)))
        for name in HOST:
            stack.enter_context(patch.object(scheduler, name, clock.watched(name, getattr(scheduler, name))))
        yield clock
