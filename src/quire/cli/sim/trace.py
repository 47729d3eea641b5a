"""The part of `quire sim` that runs a trace: from flags to a simulated fleet and a report."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.sim.trace_flags import TraceFlags
    from quire.engine.step_profile import StepProfile
    from quire.sim.fleet.report import FleetReport
    from quire.sim.fleet.simulation import FleetConfig
    from quire.workload.traces import Trace
    from quire.workload.workload_request import WorkloadRequest

PROGRESS_EVERY = 500
"""Requests between two progress updates."""
FAULTS = ("deaths", "drains", "joins", "clears", "lost")
MAX_FAULTS = 6000.0
"""Of one kind, per minute."""


def simulate_trace(path: Path, flags: "TraceFlags", seed: int, num_requests: int, *, as_json: bool) -> None:
    """Run the trace and print the report."""
    import json

    from quire.checkpoints.progress import show_progress
    from quire.sim.fleet.simulation import FleetSimulation
    from quire.workload.trace_requests import TraceRules, ruled_rows, trace_requests
    from quire.workload.traces import TraceError, write_trace

    config = _fleet(flags, seed)
    rules = TraceRules(flags.speedup, flags.share, flags.tenants, parsed_shares(flags.classes))
    trace = opened_trace(path, num_requests)
    if flags.save is not None:
        try:
            write_trace(flags.save, (row for _, row in ruled_rows(trace, rules)))
        except TraceError as error:
            raise ConfigError(str(error)) from error
        return
    with show_progress() as progress:

        def with_progress(requests: "Iterator[WorkloadRequest]") -> "Iterator[WorkloadRequest]":
            for number, request in enumerate(requests):
                if number % PROGRESS_EVERY == 0:
                    progress("requests", number, len(trace.rows))
                yield request

        report = FleetSimulation(config, with_progress(trace_requests(trace, rules))).run()
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print_report(report, trace, config.profile)
    if report.num_lost:
        typer.echo(f"{report.num_lost:,} requests never ended: this is a bug in quire", err=True)
        raise typer.Exit(1)


def _fleet(flags: "TraceFlags", seed: int) -> "FleetConfig":
    from quire.engine.step_profile import StepProfile
    from quire.sim.fleet.faults import FleetFaults
    from quire.sim.fleet.policies import make_policy
    from quire.sim.fleet.simulation import FleetConfig

    flags.check_policy()
    return FleetConfig(
        flags.member_size(),
        StepProfile.parse(flags.profile),
        make_policy(flags.policy, flags.block_size),
        flags.members,
        flags.gateways,
        report_age_s=flags.report_age_s,
        detect_delay_s=flags.detect_delay,
        faults=FleetFaults.in_a_minute(**parsed_faults(flags.faults)),
        seed=seed,
    )


def opened_trace(path: Path, num_requests: int) -> "Trace":
    """The trace of a file, or its first requests."""
    from quire.workload.traces import TraceError, read_trace

    try:
        trace = read_trace(path).spread()
    except TraceError as error:
        raise ConfigError(str(error)) from error
    return trace.head(num_requests) if num_requests else trace


def parsed_shares(text: str) -> dict[str, float]:
    """`high=0.1,low=0.3` as numbers; empty for an empty text."""
    shares: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, share = part.partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            raise ConfigError(f"expected classes such as high=0.1,low=0.3, got {text!r}") from None
        if name not in ("high", "normal", "low") or not 0.0 <= shares[name] <= 1.0 or sum(shares.values()) > 1.0:
            raise ConfigError(f"expected classes high, normal and low with shares of up to 1 in total, got {text!r}")
    return shares


def parsed_faults(text: str) -> dict[str, float]:
    """`deaths=2,lost=0.01` as numbers; empty for an empty text."""
    rates: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, rate = part.partition("=")
        try:
            rates[name] = float(rate)
        except ValueError:
            raise ConfigError(f"expected faults such as deaths=2,lost=0.01, got {text!r}") from None
        most = 1.0 if name == "lost" else MAX_FAULTS
        if name not in FAULTS or not 0.0 <= rates[name] <= most:
            raise ConfigError(
                f"expected faults of {', '.join(FAULTS)}: 0 to {MAX_FAULTS:g} per minute, and a share of up to 1 for "
                f"lost, got {part!r}"
            )
    return rates


def _print_report(report: "FleetReport", trace: "Trace", profile: "StepProfile") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "how much", title=f"{trace.name}, {profile.origin}", title_justify="left")
    ttft, tpot = report.ttft_s, report.tpot_s
    for what, how_much in (
        ("requests", f"{report.num_requests:,}, {report.num_refused:,} refused, {report.num_moves:,} moved"),
        ("deaths", f"{report.num_deaths:,}, {report.num_sent_to_dead:,} requests sent before they were noticed"),
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
