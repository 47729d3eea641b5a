"""Small fleets in which everything goes wrong, one for each seed: who is there, how large, who chooses and what fails
are drawn, and so is the load."""

from collections.abc import Iterator
from random import Random

from quire.engine.step_profile import StepProfile
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.policies import POLICIES
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetFaults
from quire.workload.workload_request import WorkloadRequest
from tests.support.fleet.checked_fleet import CheckedFleet

MOST_BLOCKS = 8
"""Of a prompt and its answer."""


def run_storm(seed: int, num_requests: int = 60) -> FleetReport:
    """Its fleet under its load, with invariants looked at throughout."""
    random = Random(f"fleet {seed}")
    block_size = random.choice((2, 4, 8))
    size = MemberSize(
        random.choice((MOST_BLOCKS + 2, 24, 60)),
        block_size,
        max_step_tokens=random.choice((16, 40)),
        max_running=random.choice((2, 4, 8)),
        max_requests=random.choice((3 * num_requests, 1 << 20)),
    )
    config = FleetConfig(
        size,
        StepProfile.by_hand(random.choice((500.0, 2_000.0)), step_s=random.choice((0.005, 0.02))),
        random.choice(list(POLICIES)),
        num_members=random.randint(1, 6),
        num_gateways=random.randint(1, 4),
        event_delay_s=random.choice((0.0, 0.01, 0.3)),
        report_age_s=random.choice((0.0, 0.02, 0.4)),
        detect_delay_s=random.choice((0.0, 0.1, 1.0)),
        faults=FleetFaults(
            period_s=random.choice((0.05, 0.2)),
            death=random.choice((0.0, 0.3)),
            drain=random.choice((0.0, 0.2)),
            join=random.choice((0.1, 0.7)),
            clear=random.choice((0.0, 0.2)),
            lost_events=random.choice((0.0, 0.3, 1.0)),
        ),
        seed=seed,
    )
    return CheckedFleet(config, _load(random, block_size, num_requests)).run()


def _load(random: Random, block_size: int, count: int) -> Iterator[WorkloadRequest]:
    """Conversations that grow, in bursts, of tenants whose blocks nobody else may hit."""
    now_s, said = 0.0, [(1,) * (2 * block_size)]
    for number in range(count):
        now_s += random.choice((0.0, 0.01, 0.1))
        turn = tuple(random.randrange(1, 4) for _ in range(random.randrange(1, 2 * block_size)))
        prompt = (*random.choice(said), *turn)[: block_size * (MOST_BLOCKS - 1) - 1]
        said = [*said[-15:], prompt]
        yield WorkloadRequest(
            name=f"r{number}",
            arrival_s=now_s,
            prompt=prompt,
            max_tokens=random.randint(1, block_size),
            seed=0,
            tenant=random.choice(("a", "a", "b")),
            priority=random.choice(("high", "normal", "low")),
        )
