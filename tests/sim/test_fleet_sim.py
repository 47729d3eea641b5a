"""Traces through simulated members and fleets: exact hits, one log for one seed, and nobody lost whatever happens."""

import json
from dataclasses import replace
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
from quire.sim.fleet.policies import POLICIES
from quire.sim.fleet.report import FleetReport
from quire.sim.fleet.simulation import FleetConfig, FleetFaults
from quire.workload.trace_requests import TraceRules, trace_requests
from quire.workload.traces import Row, Trace
from tests.support.core.block_lru import BlockLru
from tests.support.errors import raises_code
from tests.support.fleet.checked_fleet import CheckedFleet

BLOCK = 4
QUICK = StepProfile.by_hand(prompt_tokens_per_s=1_000.0, step_s=0.01)
STORM = FleetFaults(period_s=0.2, death=0.3, drain=0.2, join=0.6, clear=0.2, lost_events=0.2)


def trace_of(random: Random, num_rows: int, longest: int = 6) -> Trace:
    """Conversations that grow, a few ids of content, prompts that share beginnings."""
    rows: list[Row] = []
    said: list[tuple[int, ...]] = [(1,)]
    for index in range(num_rows):
        ids = (*random.choice(said), *(random.randrange(1, 5) for _ in range(random.randrange(3))))[:longest]
        said.append(ids)
        rows.append(Row(0.05 * index, 512 * len(ids) - random.randrange(512), random.randint(1, 900), ids))
    return Trace("small", tuple(rows), length_scale=BLOCK / 512)


def run(trace: Trace, size: MemberSize, policy: str, rules: TraceRules = TraceRules(), **how: object) -> FleetReport:  # noqa: B008
    config = FleetConfig(size, QUICK, policy, **how)  # type: ignore[arg-type]
    return CheckedFleet(config, trace_requests(trace, rules)).run()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from((8, 12, 30)))
def test_one_sequence_at_a_time_hits_what_a_replay_of_the_cache_hits(seed: int, num_blocks: int) -> None:
    rows = tuple(replace(row, output_tokens=1) for row in trace_of(Random(seed), 40).rows)
    trace = Trace("small", rows, length_scale=BLOCK / 512)
    told = run(trace, MemberSize(num_blocks, BLOCK, max_step_tokens=64, max_running=1), "round-robin")
    exact = BlockLru(num_blocks, BLOCK)
    for asked in trace_requests(trace):
        exact.run(asked.prompt)
    assert told.num_lost == told.num_refused == 0
    assert told.num_cached_tokens == exact.num_hit_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_lost_whatever_goes_wrong_and_one_seed_gives_one_log(policy: str) -> None:
    num_deaths = 0
    for seed in range(6):
        trace = trace_of(Random(seed), 60)
        told = [
            run(
                trace,
                MemberSize(40, BLOCK, max_step_tokens=16, max_running=4),
                policy,
                num_members=4,
                num_gateways=2,
                report_age_s=0.02,
                faults=STORM,
                seed=seed,
            )
            for _ in range(2 if seed == 0 else 1)
        ]
        assert told[0] == told[-1]
        assert told[0].num_lost == 0
        assert told[0].num_refused == 0
        num_deaths += told[0].num_deaths
    assert num_deaths > 6


def test_another_seed_is_another_storm() -> None:
    trace = trace_of(Random(1), 60)
    size = MemberSize(40, BLOCK, max_step_tokens=16, max_running=4)
    logs = {run(trace, size, "cost", num_members=4, faults=STORM, seed=seed).log_digest for seed in range(4)}
    assert len(logs) == 4


def test_a_stream_that_moves_goes_on_behind_the_tokens_it_has() -> None:
    trace = Trace("one", (Row(0.0, 2_000, 40_000, (1, 2, 3, 4)),), length_scale=BLOCK / 512)
    faults = FleetFaults(period_s=0.5, death=1.0, join=1.0)
    told = run(
        trace, MemberSize(200, BLOCK, max_step_tokens=64, max_running=8), "cost", num_members=3, faults=faults, seed=3
    )
    (asked,) = trace_requests(trace)
    assert told.num_moves > 0
    assert told.num_output_tokens == asked.max_tokens
    computed = sum(one.num_prompt_tokens_computed for one in told.members)
    assert computed > len(asked.prompt)  # prompt and answer again, where it went


def test_by_cost_conversations_stay_where_their_blocks_are() -> None:
    rows = tuple(
        Row(0.3 * turn + 0.01 * who, 512 * (turn + 2), 200, (1, *(100 * who + at for at in range(turn + 1))))
        for turn in range(8)
        for who in range(21)
    )
    trace = Trace("talks", rows, length_scale=BLOCK / 512)
    size = MemberSize(60, BLOCK, max_step_tokens=64, max_running=8)
    cost, turns = (run(trace, size, name, num_members=4) for name in ("cost", "round-robin"))
    assert cost.hit_rate > 1.5 * turns.hit_rate


def test_rows_of_one_tick_are_spread_up_to_the_next_and_keep_their_order() -> None:
    rows = tuple(Row(at, 512, 1, (index,)) for index, at in enumerate((0.0, 0.0, 0.0, 3.0, 3.0, 9.0)))
    spread = Trace("ticks", rows).spread()
    assert [row.arrival_s for row in spread.rows] == [0.0, 1.0, 2.0, 3.0, 6.0, 9.0]
    assert [row.hash_ids for row in spread.rows] == [row.hash_ids for row in rows]


def test_tenants_classes_and_samples_go_by_conversation() -> None:
    trace = trace_of(Random(9), 200)
    rules = TraceRules(num_tenants=3, class_shares={"high": 0.3, "low": 0.3})
    of: dict[tuple[int, ...], set[tuple[str, str]]] = {}
    for row, asked in zip(trace.rows, trace_requests(trace, rules), strict=True):
        of.setdefault(row.hash_ids[:2], set()).add((asked.tenant, asked.priority))
    assert all(len(found) == 1 for found in of.values())
    assert len(set().union(*of.values())) > 3
    half = {asked.name for asked in trace_requests(trace, TraceRules(share=0.5))}
    less = {asked.name for asked in trace_requests(trace, TraceRules(share=0.2))}
    assert less < half < {asked.name for asked in trace_requests(trace)}


def test_a_profile_says_where_it_comes_from_and_is_read_back(tmp_path: Path) -> None:
    assert QUICK.is_by_hand
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(QUICK.as_json()))
    assert StepProfile.read(file) == QUICK
    file.write_text("{}")
    with raises_code(ConfigError, "cannot_read_profile"):
        StepProfile.read(file)
    with raises_code(ConfigError, "invalid_costs"):
        StepProfile("nothing", 0.0, 0.0, 0.0, 0.0)


def test_a_trace_is_replayed_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * at, "input_length": 1_024, "output_length": 3, "hash_ids": [1, at]} for at in range(9)]
    file.write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(app, ["sim", str(file), "--members", "2", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["num_requests"], told["num_lost"], len(told["members"])) == (9, 0, 2)
    assert CliRunner().invoke(app, ["sim", str(file), "--policy", "best"]).exit_code != 0


def test_faults_and_detection_are_given_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.1 * at, "prompt_tokens": 900, "output_tokens": 30, "hash_ids": [1, at]} for at in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["sim", str(file), "--members", "3", "--gateways", "2", "--report-age", "0.1", "--json"]
    faults = ["--faults", "deaths=60,drains=20,clears=10,joins=40,lost=0.5", "--detect-delay", "0.5"]
    plain, stormy = (CliRunner().invoke(app, [*words, *more]) for more in ((), faults))
    told = [json.loads(done.stdout.splitlines()[-1]) for done in (plain, stormy)]
    assert [one["num_lost"] for one in told] == [0, 0]
    assert told[0]["num_deaths"] == 0
    assert told[1]["num_deaths"] > 0
    for wrong in ("deaths=often", "fires=1", "lost=2", "deaths=-1"):
        assert isinstance(CliRunner().invoke(app, [*words, "--faults", wrong]).exception, ConfigError)


def test_a_trace_is_saved_as_it_would_be_replayed(tmp_path: Path) -> None:
    file, saved = tmp_path / "trace.jsonl", tmp_path / "saved.jsonl"
    rows = [{"timestamp": 100 * at, "input_length": 1_024, "output_length": 3, "hash_ids": [1, at]} for at in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--share", "0.5", "--speedup", "4", "--tenants", "3"]
    done = CliRunner().invoke(app, ["sim", str(file), *flags, "--save", str(saved)])
    assert done.exit_code == 0, done.output
    direct, again = (
        json.loads(CliRunner().invoke(app, ["sim", *words, "--json"]).stdout.splitlines()[-1])
        for words in ([str(file), *flags], [str(saved)])
    )
    assert 0 < again["num_requests"] < 40
    assert [again[name] for name in ("num_requests", "num_prompt_tokens", "num_cached_tokens")] == [
        direct[name] for name in ("num_requests", "num_prompt_tokens", "num_cached_tokens")
    ]
