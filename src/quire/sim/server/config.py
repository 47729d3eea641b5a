"""The simulation for a scenario and a seed."""

from dataclasses import dataclass, replace
from random import Random

from quire.errors import ConfigError
from quire.sim.server.fault_plan import FaultRates
from quire.sim.server.guesses import Guesser
from quire.sim.server.size import ServerSize, small_shape
from quire.workload.scenarios import SCENARIOS

CHAOTIC = ("chaos", "drafts", "hybrid")
"""Scenarios with random servers and all faults."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Workload, server and faults."""

    scenario: str
    seed: int
    num_requests: int
    shape: ServerSize
    faults: FaultRates
    guesser: Guesser | None = None


def configured(scenario: str, seed: int, num_requests: int | None = None) -> SimConfig:
    """The simulation for a scenario and a seed. Chaotic scenarios draw the server and the faults, `drafts` also a
    source of drafts, `hybrid` also slots for recurrent state; others are fixed.
    """
    if scenario not in SCENARIOS:
        raise ConfigError(f"expected a scenario of {', '.join(SCENARIOS)}, got {scenario!r}")
    if scenario not in CHAOTIC:
        return SimConfig(scenario, seed, num_requests or 400, ServerSize(), FaultRates())
    random = Random(f"shape {seed}")
    drawn = int(200 * 10 ** random.random())  # drawn in any case: an explicit number must not change the server
    shape, faults = small_shape(random, num_tenants=5), FaultRates.drawn(random)
    config = SimConfig(scenario, seed, num_requests or drawn, shape, faults)
    if scenario == "chaos":
        return config
    if scenario == "hybrid":
        num_kept = Random(f"slots {seed}").choice((0, 1, shape.max_running, 4 * shape.max_running))
        return replace(config, shape=replace(shape, num_slots=shape.max_running + 1 + num_kept))
    # Most of these servers have no room in a step for guesses: half of them get some.
    wider = replace(shape, max_step_tokens=shape.max_step_tokens + Random(f"room {seed}").choice((0, 64)))
    return replace(config, shape=wider, guesser=Guesser.drawn(seed, shape.vocabulary_size))
