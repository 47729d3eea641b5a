"""`quire sim`: run the real scheduler and KV memory with a simulated device, and print a summary."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.columns import print_table
from quire.cli.shared.flags import with_fields
from quire.cli.sim.trace_flags import TraceFlags

if TYPE_CHECKING:
    from quire.sim.server.report import Report

TRACE_HELP = "A trace to replay: JSONL (Mooncake, ShareGPT, quire, quire serve --trace) or Azure's CSV; also as .gz."


@with_fields(TraceFlags, "With a trace: ")
def sim(
    flags: TraceFlags,
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help=TRACE_HELP)] = None,
    scenario: Annotated[str, typer.Option(help="Workload to simulate; --list shows all.")] = "chat",
    seed: Annotated[int, typer.Option(help="Random seed: the same seed gives the same run.")] = 1,
    requests: Annotated[int, typer.Option(min=0, help="Number of requests; 0: the scenario's own number.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the scenarios and exit.")] = False,
) -> None:
    """Simulate a server: real scheduler and KV memory, a simulated device and a simulated clock.

    With a trace, replay its requests on a server or a fleet; steps take as long as a machine's profile predicts.
    """
    from quire.sim.server.config import make_config
    from quire.sim.server.simulation import Simulation
    from quire.workload.scenarios import SCENARIOS

    if show_list:
        for known_scenario in SCENARIOS.values():
            typer.echo(f"{known_scenario.name:10} {known_scenario.purpose}")
        return
    if trace is not None:
        from quire.cli.sim.trace import simulate_trace

        simulate_trace(trace, flags, seed, requests, as_json=as_json)
        return
    report = Simulation(make_config(scenario, seed, requests or None)).run()
    if as_json:
        _print_json(report)
    else:
        _print_tables(report)
    if report.violations:
        for violation in report.violations[:10]:
            typer.echo(f"violation: {violation}", err=True)
        typer.echo(f"\nhint: replay it with: {report.replay}", err=True)
        raise typer.Exit(1)


def _print_json(report: "Report") -> None:
    content = {
        "scenario": report.config.scenario,
        "seed": report.config.seed,
        "requests": len(report.ledger.entries),
        "simulated_s": round(report.simulated_s, 6),
        "ended_by": dict(report.reasons()),
        **asdict(report.totals),
        "waits": [asdict(waits) for waits in report.waits()],
        "log_digest": report.log_digest,
        "violations": report.violations,
    }
    typer.echo(json.dumps(content))


def _print_tables(report: "Report") -> None:
    totals = report.totals
    hit_rate = totals.hit_tokens / totals.query_tokens if totals.query_tokens else 0.0
    title = f"{report.config.scenario}, seed {report.config.seed}"
    endings = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.reasons().items()))
    rows = (
        ("requests", f"{len(report.ledger.entries):,} accepted, {totals.num_refused:,} too large"),
        ("rejected", f"{totals.num_turned_away:,} times, {totals.num_displaced:,} displaced"),
        ("finish reasons", endings or "none"),
        ("steps", f"{totals.num_steps:,} in {report.simulated_s:,.1f} simulated seconds"),
        ("tokens computed", f"{totals.num_computed_tokens:,} ({totals.num_recomputed_tokens:,} recomputed)"),
        ("tokens produced", f"{totals.num_output_tokens:,}"),
        ("prompt tokens reused", f"{totals.hit_tokens:,} of {totals.query_tokens:,} ({hit_rate:.1%})"),
        ("preemptions", f"{totals.num_preemptions:,}"),
        ("blocks evicted", f"{totals.num_evictions:,}"),
        ("runner crashes", f"{totals.num_crashes:,}"),
        ("event log digest", report.log_digest),
    )
    print_table(title, ("metric", "value"), rows)
    waits = [
        (row.who, f"{row.num_requests:,}", *(f"{wait_s:.2f} s" for wait_s in (row.median_s, row.p95_s, row.longest_s)))
        for row in report.waits()
    ]
    print_table("waits", ("group", "requests", "median wait", "95%", "longest"), waits)
