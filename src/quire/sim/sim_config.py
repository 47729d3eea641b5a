"""Which simulation a name and a seed stand for."""

from dataclasses import dataclass
from random import Random

from quire.errors import ConfigError
from quire.sim.fault_plan import FaultRates
from quire.sim.server_size import ServerSize, small_shape
from quire.workload.scenarios import SCENARIOS


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Which workload, on what server, with which faults."""

    scenario: str
    seed: int
    num_requests: int
    shape: ServerSize
    faults: FaultRates


def configured(scenario: str, seed: int, num_requests: int | None = None) -> SimConfig:
    """The simulation a name and a seed stand for. Chaos draws its server and its faults; others are as they are."""
    if scenario not in SCENARIOS:
        raise ConfigError(f"there is no scenario {scenario!r}; choose one of {', '.join(SCENARIOS)}")
    if scenario != "chaos":
        return SimConfig(scenario, seed, num_requests or 400, ServerSize(), FaultRates())
    random = Random(f"shape {seed}")
    drawn = int(200 * 10 ** random.random())  # drawn in any case: a given number must not change the server
    return SimConfig(
        scenario, seed, num_requests or drawn, small_shape(random, num_tenants=5), FaultRates.drawn(random)
    )
