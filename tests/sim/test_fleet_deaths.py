"""Members that die without a word: gateways choose them until they have missed their beats; nothing is lost."""

from collections.abc import Callable
from random import Random

import pytest

from quire.errors import InvariantError
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import MemberState
from quire.fleet.routing.router import Router
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.policies import POLICIES
from quire.sim.fleet.report import FleetReport, Latencies
from quire.sim.fleet.simulation import FleetConfig, FleetFaults
from quire.workload.trace_requests import trace_requests
from tests.sim.test_fleet_sim import BLOCK, QUICK, STORM, trace_of
from tests.support.errors import raises_code
from tests.support.fleet.checked_fleet import CheckedFleet
from tests.support.fleet.fleet_storms import run_storm

SIZE = MemberSize(40, BLOCK, max_step_tokens=16, max_running=4)


def simulation(policy: str, seed: int, faults: FleetFaults = STORM, **how: object) -> CheckedFleet:
    config = FleetConfig(SIZE, QUICK, policy, 4, 3, faults=faults, seed=seed, **how)  # type: ignore[arg-type]
    return CheckedFleet(config, trace_requests(trace_of(Random(seed), 60)))


def storm(policy: str, seed: int, detect_delay_s: float, faults: FleetFaults = STORM) -> FleetReport:
    return simulation(policy, seed, faults, detect_delay_s=detect_delay_s, report_age_s=0.02).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_death_that_nobody_tells_of_loses_no_request(policy: str) -> None:
    told = [storm(policy, seed, delay_s) for seed in range(4) for delay_s in (0.1, 0.6)]
    assert storm(policy, 0, 0.1) == told[0], "one seed gives one life"
    assert all(one.num_lost == one.num_refused == 0 for one in told)
    assert sum(one.num_deaths for one in told) > 8
    assert sum(one.num_sent_to_dead for one in told) > 0


def test_the_longer_a_death_is_not_heard_the_more_is_sent_to_the_dead() -> None:
    faults = FleetFaults(period_s=0.5, death=0.5, join=0.1)
    sent = [
        sum(storm("round-robin", seed, delay_s, faults).num_sent_to_dead for seed in range(5)) for delay_s in (0, 1)
    ]
    assert sent[0] == 0
    assert sent[1] > 10


def test_each_gateway_hears_of_a_death_at_its_own_moment() -> None:
    fleet = simulation("cost", 1, FleetFaults(), detect_delay_s=1.0)
    fleet.member_slots[2].remove_member()
    heard: dict[int, float] = {}
    while len(heard) < 3:
        fleet.now_s, _, happen, told = fleet.event_queue.pop(0)
        fleet.event_queue.sort()
        happen(*told)
        for gateway in fleet.gateways:
            if 2 not in gateway.member_epochs:
                state = gateway.router.membership.state_of("00002")
                assert state is MemberState.SUSPECT
                heard.setdefault(gateway.number, fleet.now_s)
        fleet.event_queue.sort()
    assert len(set(heard.values())) == 3
    assert all(1.0 <= moment_s <= 1.3 for moment_s in heard.values())


def test_what_a_dead_member_said_is_not_heard_of_the_next_one() -> None:
    fleet = simulation("cost", 1, FleetFaults(), detect_delay_s=1.0)
    seat = fleet.member_slots[0]
    epoch = seat.epoch
    fleet.leave(seat, is_detected=False)
    fleet.join(seat)
    fleet.deliver_load_report(seat, epoch, 999, 0.0)
    loads = [one.router.loads for one in fleet.gateways]
    assert [one.in_flight_tokens["00000"] for one in loads] == [0, 0, 0]
    fleet.deliver_load_report(seat, seat.epoch, 999, 0.0)
    assert [one.in_flight_tokens["00000"] for one in loads] == [999, 999, 999]


def leaks(loads: MemberLoads, request_id: str) -> None:
    loads.member_of.pop(request_id, None)


def forgets(router: Router, request_id: str) -> tuple[()]:
    router.routed.pop(request_id, None)
    return ()


@pytest.mark.parametrize(
    ("owner", "method", "broken"), [(MemberLoads, "release", leaks), (Router, "end_request", forgets)]
)
def test_a_router_that_is_broken_is_found_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, method, broken)
    with raises_code(InvariantError, "router_inconsistent"):
        simulation("cost", 1, FleetFaults()).run()


def test_a_request_that_is_nowhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Latencies, "record_end", lambda *_: None)
    with raises_code(InvariantError, "requests_miscounted"):
        simulation("random", 1, FleetFaults()).run()


def test_small_fleets_under_storms_lose_nothing_and_keep_their_invariants() -> None:
    told = [run_storm(seed, num_requests=30) for seed in range(24)]
    assert sum(one.num_lost for one in told) == 0
    assert all(one.num_requests == 30 for one in told)
    assert sum(one.num_moves for one in told) > 10
    assert told[3] == run_storm(3, num_requests=30)
