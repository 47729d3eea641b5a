"""The part of `quire sim` that runs a trace on a simulated fleet and prints a report."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.cli.shared.columns import print_table
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.sim.trace_flags import TraceFlags
    from quire.engine.step_profile import StepProfile
    from quire.sim.fleet.report import FleetReport
    from quire.sim.fleet.simulation import FleetConfig
    from quire.workload.traces import Trace
    from quire.workload.workload_request import WorkloadRequest

PROGRESS_EVERY = 500
"""Number of requests between two progress updates."""
FAULTS = ("deaths", "drains", "joins", "clears", "lost")
MAX_FAULTS = 6000.0
"""Maximum rate of one kind of fault, per minute."""


def simulate_trace(path: Path, flags: "TraceFlags", seed: int, num_requests: int, *, as_json: bool) -> None:
    """Run the trace and print the report; with `flags.save`, only write the trace's requests to that file."""
    from quire.checkpoints.progress import show_progress
    from quire.sim.fleet.simulation import FleetSimulation
    from quire.workload.trace_requests import TraceRules, apply_rules, trace_requests
    from quire.workload.traces import TraceError, write_trace

    config = _fleet(flags, seed)
    rules = TraceRules(flags.speedup, flags.share, flags.tenants, parse_shares(flags.classes))
    trace = open_trace(path, num_requests)
    if flags.save is not None:
        try:
            write_trace(flags.save, (row for _, row in apply_rules(trace, rules)))
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
    from quire.sim.fleet.simulation import FleetConfig, FleetFaults

    flags.check_policy()
    return FleetConfig(
        flags.member_size(),
        StepProfile.parse(flags.profile),
        flags.policy,
        flags.members,
        flags.gateways,
        report_age_s=flags.report_age_s,
        detect_delay_s=flags.detect_delay,
        faults=FleetFaults.per_minute(**parse_faults(flags.faults)),
        seed=seed,
    )


def open_trace(path: Path, num_requests: int) -> "Trace":
    """Read a trace file, or its first `num_requests` requests; 0: all. Raises ConfigError for an invalid file."""
    from quire.workload.traces import TraceError, read_trace

    try:
        trace = read_trace(path).spread()
    except TraceError as error:
        raise ConfigError(str(error)) from error
    return trace.head(num_requests) if num_requests else trace


def parse_shares(text: str) -> dict[str, float]:
    """Parse the shares of priority classes, such as `high=0.1,low=0.3`. Raises ConfigError for invalid shares."""
    shares = _named_numbers(text, "classes such as high=0.1,low=0.3")
    is_valid = all(0.0 <= share <= 1.0 for share in shares.values()) and sum(shares.values()) <= 1.0
    if not (is_valid and shares.keys() <= {"high", "normal", "low"}):
        raise ConfigError(f"expected classes high, normal and low with shares of up to 1 in total, got {text!r}")
    return shares


def parse_faults(text: str) -> dict[str, float]:
    """Parse the rates of faults, such as `deaths=2,lost=0.01`. Raises ConfigError for invalid rates."""
    rates = _named_numbers(text, "faults such as deaths=2,lost=0.01")
    for name, rate in rates.items():
        if name not in FAULTS or not 0.0 <= rate <= (1.0 if name == "lost" else MAX_FAULTS):
            raise ConfigError(
                f"expected faults of {', '.join(FAULTS)}: 0 to {MAX_FAULTS:g} per minute, and a share of up to 1 for "
                f"lost, got '{name}={rate:g}'"
            )
    return rates


def _named_numbers(text: str, expected: str) -> dict[str, float]:
    """Parse a text such as `deaths=2,lost=0.01`; `expected` describes it in the error message."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    try:
        return {name: float(number) for name, _, number in pairs}
    except ValueError:
        raise ConfigError(f"expected {expected}, got {text!r}") from None


def _print_report(report: "FleetReport", trace: "Trace", profile: "StepProfile") -> None:
    ttft, tpot = report.ttft_s, report.tpot_s
    rows = (
        ("requests", f"{report.num_requests:,}, {report.num_refused:,} refused, {report.num_moves:,} moved"),
        ("deaths", f"{report.num_deaths:,}, {report.num_sent_to_dead:,} requests sent to dead members"),
        ("simulated time", f"{report.simulated_s:,.0f} s"),
        (
            "prompt tokens reused",
            f"{report.num_cached_tokens:,} of {report.num_prompt_tokens:,} ({report.hit_rate:.1%})",
        ),
        ("output tokens/s", f"{report.output_tokens_per_s:,.0f}"),
        ("TTFT", f"p50 {ttft.p50:.2f} s, p90 {ttft.p90:.2f} s, p95 {ttft.p95:.2f} s, p99 {ttft.p99:.2f} s"),
        ("TPOT", f"p50 {tpot.p50 * 1e3:.0f} ms, p95 {tpot.p95 * 1e3:.0f} ms"),
        ("members", f"{len(report.members):,}, busy {report.utilisation:.0%} of the time"),
        ("maximum work over mean", f"{report.imbalance:.2f}"),
        ("event log digest", report.log_digest),
    )
    print_table(f"{trace.name}, {profile.origin}", ("metric", "value"), rows)
