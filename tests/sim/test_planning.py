"""Plans on small loads: the answer of exhaustive search, the cost of one less, and runs that are given up rightly."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import isnan
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from quire.cli import app
from quire.engine.step_profile import StepProfile
from quire.errors import ConfigError
from quire.sim.fleet.member import MemberSize
from quire.sim.fleet.simulation import FleetSimulation
from quire.sim.planning.curves import plan_curves
from quire.sim.planning.effects import batch_means, other_settings, setting_effects
from quire.sim.planning.objectives import LatencyObjective
from quire.sim.planning.planning import CapacityPlan, Planner, PlanSetup, pool_candidates
from quire.sim.planning.watched_latencies import WatchedLatencies
from quire.verdicts import SpeedVerdict
from quire.workload.workload_request import WorkloadRequest
from tests.support.errors import raises_code

QUICK = StepProfile.by_hand(prompt_tokens_per_s=1_000.0, step_s=0.01)
SIZE = MemberSize(64, 4, max_step_tokens=32, max_running=8)


def requests_of(seed: int, num_requests: int = 80, gap_s: float = 0.04) -> list[WorkloadRequest]:
    """Questions about a few documents, of a few tenants and classes."""
    random = Random(seed)
    documents = [(random.getrandbits(30) + 1,) * random.randint(8, 40) for _ in range(6)]
    return [
        WorkloadRequest(
            f"r{number}",
            number * gap_s,
            (*random.choice(documents), random.getrandbits(30) + 1, 1),
            random.randint(1, 12),
            0,
            f"tenant{number % 2}",
            random.choice(("high", "normal", "low")),
        )
        for number in range(num_requests)
    ]


def setup_of(requests: list[WorkloadRequest], slo: str = "ttft_p95=80ms", size: MemberSize = SIZE) -> PlanSetup:
    return PlanSetup(lambda: requests, LatencyObjective.parse(slo), QUICK, size)


def exhaustive_pool(setup: PlanSetup, num_members: int, pools: tuple[int, ...]) -> int | None:
    found = None
    for pool in reversed(pools):
        config = setup.fleet(num_members, replace(setup.size, num_blocks=pool))
        if setup.objective.misses(FleetSimulation(config, setup.make_requests()).run()):
            break
        found = pool
    return found


@cache
def tight_plan() -> tuple[Planner, CapacityPlan]:
    """Of a load that one member does not bear; several tests look at it."""
    planner = Planner(setup_of(requests_of(1, gap_s=0.02)))
    return planner, planner.plan(members_max=8)


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_is_that_of_exhaustive_search_over_the_same_pools(seed: int) -> None:
    setup = setup_of(requests_of(seed, gap_s=(0.03, 0.06)[seed % 2]))
    told = Planner(setup).plan(members_max=4)
    pools = pool_candidates(told.min_blocks, SIZE.num_blocks)
    assert told.num_blocks == exhaustive_pool(setup, told.num_members or 4, pools)
    assert told.num_members is not None


def test_one_less_does_not_meet_the_objective_and_is_told_with_its_figures() -> None:
    planner, told = tight_plan()
    setup = planner.setup
    assert told.pool is not None
    assert told.num_members is not None
    assert told.num_members > 1
    for least in (told.members, told.pool):
        assert least.one_less is not None
        assert least.report is not None
        assert least.report_one_less is not None
        assert not setup.objective.misses(least.report)
        assert setup.objective.misses(least.report_one_less)
        # Whole runs, also of what was given up while it was searched.
        assert least.report_one_less.num_requests == 80
    assert told.members.one_less == told.num_members - 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(("ttft_p95=90ms", "tpot_p90=14ms", "ttft_p50=30ms,tpot_p99=40ms")))
def test_a_run_is_given_up_only_if_its_end_would_miss_the_objective(seed: int, slo: str) -> None:
    requests = requests_of(seed, num_requests=40, gap_s=Random(seed).choice((0.01, 0.03, 0.06)))
    setup = setup_of(requests, slo, replace(SIZE, num_blocks=Random(seed).choice((14, 24, 64))))
    planner = Planner(setup)
    _, watched = planner.watched_run(1, setup.size, setup.objective)
    whole, seen = planner.watched_run(1, setup.size)
    plain = FleetSimulation(setup.fleet(1, setup.size), requests).run()
    assert whole == plain
    assert watched.is_objective_missed == bool(setup.objective.misses(plain))
    assert sorted(seen.ttft_by_arrival_s) == sorted(seen.ttft_s)
    assert sorted(one for one in seen.tpot_by_arrival_s if not isnan(one)) == sorted(seen.tpot_s)


def test_waiting_too_long_is_a_miss_before_the_first_token_comes() -> None:
    planner = Planner(setup_of(requests_of(0, num_requests=2)))
    watched = WatchedLatencies(planner.facts, LatencyObjective.parse("ttft_p95=1s"))
    watched.record_arrival("a", 0.0)
    watched.record_arrival("b", 1.0)
    assert not watched.is_objective_missed
    watched.record_first_token("b", 1.1)
    assert watched.is_objective_missed


def test_a_request_that_fits_no_pool_is_an_answer() -> None:
    told = Planner(setup_of(requests_of(0), size=replace(SIZE, num_blocks=4))).plan(members_max=4)
    assert (told.num_members, told.num_blocks, told.members.trials) == (None, None, ())
    assert "the longest request needs" in told.what_limits[0]


def test_an_objective_that_nothing_meets_is_an_answer_with_what_limits_it() -> None:
    told = Planner(setup_of(requests_of(0), "tpot_p50=1ms")).plan(members_max=3)
    assert told.num_members is None
    assert any("a step takes at least 10 ms" in one for one in told.what_limits)
    idle = Planner(setup_of(requests_of(0, gap_s=1.0), "ttft_p50=1ms")).plan(members_max=2)
    assert any("will hardly help" in one for one in idle.what_limits)
    busy = Planner(setup_of(requests_of(0, gap_s=0.001), "ttft_p50=1ms")).plan(members_max=1)
    assert any("raise the maximum to try" in one for one in busy.what_limits)


def test_larger_pools_are_tried_where_no_number_of_members_is_enough() -> None:
    requests = requests_of(3, gap_s=0.05)
    told = Planner(setup_of(requests, "ttft_p90=50ms", replace(SIZE, num_blocks=14))).plan(members_max=1, pool_max=96)
    assert told.members.value is None
    assert told.num_members == 1
    assert told.num_blocks is not None
    assert told.num_blocks > 14


def test_candidates_lie_a_fifth_apart_and_have_both_ends() -> None:
    pools = pool_candidates(100, 1_000)
    assert pools[0] == 100
    assert pools[-1] == 1_000
    assert all(1.0 < later / one < 1.2 for one, later in pairwise(pools))
    assert pool_candidates(3, 3) == (3,)


class TestEffects:
    def effects(self, requests: list[WorkloadRequest], size: MemberSize = SIZE) -> dict[tuple[str, str], SpeedVerdict]:
        planner = Planner(setup_of(requests, size=size))
        found = setting_effects(planner, 1, size.num_blocks)
        return {(one.setting, one.other): one.verdict for one in found}

    def test_blocks_that_are_too_large_for_what_prompts_share_are_slower(self) -> None:
        # Seven blocks of 4 are shared, and three of 8.
        shared = [replace(one, prompt=(7,) * 28 + one.prompt[-2:]) for one in requests_of(5, 150)]
        assert self.effects(shared)["block size", "8 tokens"] is SpeedVerdict.SLOWER

    def test_one_cache_for_all_tenants_is_faster_where_they_ask_the_same(self) -> None:
        assert self.effects(requests_of(5, 150))["cache shares", "one for all"] is SpeedVerdict.FASTER

    def test_what_concerns_nobody_is_not_tried_and_a_short_load_has_no_verdict(self) -> None:
        plain = [replace(one, tenant="one", priority="normal") for one in requests_of(5, 40)]
        found = {one.setting: one for one in setting_effects(Planner(setup_of(plain)), 1, 64)}
        assert "--classes" in found["head starts"].reason
        assert "--tenants" in found["cache shares"].reason
        assert "a verdict needs 70 requests, got 40" in found["step budget"].reason
        assert {one.verdict for one in found.values()} == {SpeedVerdict.NOT_COMPARABLE}

    def test_a_value_that_a_server_refuses_is_told_with_the_reason(self) -> None:
        size = replace(SIZE, max_step_tokens=12)
        found = list(setting_effects(Planner(setup_of(requests_of(5), size=size)), 1, 64))
        assert any("rejected by a server: expected max_step_tokens" in one.reason for one in found)

    def test_half_and_twice_the_block_size_keep_the_bytes_of_the_pool(self) -> None:
        sizes = [size for one, size in other_settings(SIZE, 1, ("normal",)) if one.setting == "block size"]
        assert [one.num_blocks * one.block_size for one in sizes if one is not None] == [256, 256]

    def test_batches_follow_each_other_and_leave_nobody_out(self) -> None:
        assert batch_means([1.0, 3.0, float("nan"), 5.0, 7.0], 2) == [2_000.0, 6_000.0]
        assert batch_means([float("nan"), 1.0], 2) == [None, 1_000.0]


def test_curves_have_the_answer_on_them_and_tell_what_was_given_up() -> None:
    planner, told = tight_plan()
    assert told.num_members is not None
    assert told.num_blocks is not None
    curves = plan_curves(planner, told.num_members, told.num_blocks, 8)
    assert told.num_blocks in [point.num_blocks for point in curves.over_pool]
    assert told.num_members in [point.num_members for point in curves.over_members]
    rates = [point.hit_rate or 0.0 for point in curves.over_pool]
    assert rates[-1] > rates[0] > 0.0
    tight = Planner(setup_of(requests_of(1, gap_s=0.02), "ttft_p95=12ms"))
    assert any(point.ttft_p95_s is None for point in plan_curves(tight, 1, 16, 2).over_load)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    random = Random(2)
    path = tmp_path / "small.jsonl"
    with path.open("w") as lines:
        for number in range(90):
            ids = [random.randrange(4), *(random.randrange(9) for _ in range(random.randrange(3)))]
            row = {"timestamp": number * 400, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
            lines.write(json.dumps(row) + "\n")
    return path


def planned(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_the_answer_and_says_that_nobody_measured_the_clock(trace_file: Path) -> None:
    code, out, err = planned(str(trace_file), "--slo", "ttft_p95=200ms", "--pool", "24", "--members-max", "4")
    assert code == 0
    assert "KV blocks each" in out.splitlines()[0]
    assert ": not measured." in out
    assert "block size" in out
    assert err.startswith("run 1: 1 x 24 blocks")


def test_json_is_one_object_on_stdout_and_a_profile_is_named(trace_file: Path, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(replace(QUICK, name="measured", is_by_hand=False).as_json()))
    flags = ("--slo", "ttft_p95=2s", "--pool", "24", "--no-effects", "--json", "--profile", str(profile))
    code, out, _ = planned(str(trace_file), *flags, "--members-max", "8", "--report", str(tmp_path / "plan.html"))
    told = json.loads(out)
    assert code == 0
    assert told["num_members"] == told["members"]["value"]
    assert told["members"]["report"]["num_requests"] == 90
    assert (told["profile"], told["is_profile_by_hand"], told["effects"]) == ("measured", False, [])
    assert len(told["curves"]["over_load"]) == 6
    assert ": not measured." not in (tmp_path / "plan.html").read_text()


def test_the_exit_code_is_one_if_nothing_meets_the_objective(trace_file: Path) -> None:
    code, out, _ = planned(str(trace_file), "--slo", "ttft_p50=1ms", "--pool", "24", "--members-max", "2")
    assert code == 1
    assert "No tried configuration meets the objective" in out
    assert "will hardly help" in out


def wrong_flags(tmp_path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    yield ("--slo", "fast"), "invalid_objective"
    yield ("--slo", "ttft_p95=1s", "--policy", "best"), "invalid_config"
    yield ("--slo", "ttft_p95=1s", "--report", str(tmp_path / "no" / "plan.html")), "report_without_folder"
    yield ("--slo", "ttft_p95=1s", "--report", str(tmp_path)), "report_without_folder"
    yield ("--slo", "ttft_p95=1s", "--share", "0"), "empty_load"
    yield ("--slo", "ttft_p95=1s", "--profile", str(tmp_path / "none.json")), "cannot_read_profile"


def test_what_cannot_be_planned_is_refused_with_the_rule(trace_file: Path, tmp_path: Path) -> None:
    for flags, code in wrong_flags(tmp_path):
        with raises_code(ConfigError, code):
            planned(str(trace_file), *flags, "--pool", "24", "--no-effects", "--members-max", "2", "--requests", "20")
