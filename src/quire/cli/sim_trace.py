"""The part of `quire sim` that replays a trace: flags to a fleet, and what a person reads of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.fleet_report import FleetReport
    from quire.sim.step_profile import StepProfile
    from quire.workload.traces import Trace
    from quire.workload.workload_request import WorkloadRequest

TELL_EVERY = 500
"""Requests between two signs of life."""


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """What was said on the command line."""

    trace: Path
    members: int
    gateways: int
    policy: str
    pool: int
    block_size: int
    step_tokens: int
    running: int
    speedup: float
    share: float
    tenants: int
    classes: str
    requests: int
    profile: Path | None
    seed: int
    as_json: bool


def simulate_trace(flags: TraceFlags) -> None:
    """Replay it, and print what came of it."""
    import json

    from quire.checkpoints.progress import show_progress
    from quire.sim.fleet_sim import FleetConfig, FleetSimulation
    from quire.sim.member import MemberSize
    from quire.sim.policies import POLICIES, make_policy
    from quire.workload.trace_requests import TraceRules, trace_requests

    if flags.policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, {flags.policy!r} given")
    trace = opened_trace(flags.trace, flags.requests)
    rules = TraceRules(flags.speedup, flags.share, flags.tenants, parsed_shares(flags.classes))
    size = MemberSize(flags.pool, flags.block_size, flags.step_tokens, flags.running)
    config = FleetConfig(
        size,
        profile_of(flags.profile),
        make_policy(flags.policy, flags.block_size),
        flags.members,
        flags.gateways,
        report_age_s=0.0 if flags.gateways == 1 else 0.25,
        seed=flags.seed,
    )
    with show_progress() as progress:

        def told(requests: "Iterator[WorkloadRequest]") -> "Iterator[WorkloadRequest]":
            for number, asked in enumerate(requests):
                if number % TELL_EVERY == 0:
                    progress("requests", number, len(trace.rows))
                yield asked

        report = FleetSimulation(config, told(trace_requests(trace, rules))).run()
    if flags.as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print_report(report, trace, config.profile.name)
    if report.num_lost:
        typer.echo(f"{report.num_lost:,} requests never ended: this is a defect of quire", err=True)
        raise typer.Exit(1)


def opened_trace(path: Path, num_requests: int) -> "Trace":
    """The trace of a file, or its first requests."""
    from quire.workload.traces import TraceError, read_trace

    try:
        trace = read_trace(path).spread()
    except TraceError as error:
        raise ConfigError(str(error)) from error
    return trace.head(num_requests) if num_requests else trace


def parsed_shares(given: str) -> dict[str, float]:
    """`high=0.1,low=0.3` as numbers; nothing is nothing."""
    shares: dict[str, float] = {}
    for part in filter(None, given.split(",")):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise ConfigError(f"classes must look like high=0.1,low=0.3, {given!r} given") from None
        if name not in ("high", "normal", "low") or not 0.0 <= shares[name] <= 1.0 or sum(shares.values()) > 1.0:
            raise ConfigError(f"classes are high, normal and low, with shares of up to 1 in all, {given!r} given")
    return shares


def profile_of(path: Path | None) -> "StepProfile":
    """The file's, or that of a machine nobody has measured."""
    from quire.sim.step_profile import StepProfile

    return StepProfile.by_hand(prompt_tokens_per_s=16_000.0, step_s=0.01) if path is None else StepProfile.read(path)


def _print_report(report: "FleetReport", trace: "Trace", profile: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "how much", title=f"{trace.name}, profile {profile}", title_justify="left")
    ttft, tpot = report.ttft_s, report.tpot_s
    for what, how_much in (
        ("requests", f"{report.num_requests:,}, {report.num_refused:,} refused, {report.num_moves:,} moved"),
        ("simulated time", f"{report.simulated_s:,.0f} s"),
        (
            "prompt tokens reused",
            f"{report.num_cached_tokens:,} of {report.num_prompt_tokens:,} ({report.hit_rate:.1%})",
        ),
        ("output tokens/s", f"{report.output_tokens_per_s:,.0f}"),
        ("first token", f"p50 {ttft.p50:.2f} s, p90 {ttft.p90:.2f} s, p95 {ttft.p95:.2f} s, p99 {ttft.p99:.2f} s"),
        ("each further token", f"p50 {tpot.p50 * 1e3:.0f} ms, p95 {tpot.p95 * 1e3:.0f} ms"),
        ("members", f"{len(report.members):,}, busy {report.utilisation:.0%} of the time"),
        ("most work over mean", f"{report.imbalance:.2f}"),
        ("event log", report.log_digest),
    ):
        table.add_row(what, how_much)
    Console(highlight=False).print(table)
