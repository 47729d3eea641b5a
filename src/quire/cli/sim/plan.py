"""`quire plan`: find the number of members and the pool size that a load needs, and the effects of settings."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.shared.flags import with_fields
from quire.cli.sim.trace_flags import FleetFlags

if TYPE_CHECKING:
    from quire.sim.planning.page import PlanResult
    from quire.sim.planning.planning import Minimum, PlanSetup

CLEAR_LINE = "\r\x1b[2K"
POOL_MAX_HELP = "Largest pool to try, in KV blocks, if no number of members is enough; 0: none."
REPORT_HELP = "Write a page with curves (HTML); needs about twenty more runs."
EPILOG = """\
\b
The result goes to stdout, progress to stderr. The exit code is 1 if no
configuration that was tried meets the objective.
\b
Examples:
  quire plan conversation_trace.jsonl.gz --slo ttft_p95=2s,tpot_p95=80ms --profile gpu.json
  quire plan conversation_trace.jsonl.gz --slo ttft_p95=2s --requests 2000 --report plan.html
"""


@with_fields(FleetFlags)
def plan(
    fleet: FleetFlags,
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace to plan for, in any format that quire sim reads.")
    ],
    slo: Annotated[str, typer.Option(help="The objective, such as ttft_p95=2s,tpot_p95=80ms.")],
    members_max: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of members to try.")] = 64,
    pool_max: Annotated[int, typer.Option(min=0, help=POOL_MAX_HELP)] = 0,
    effects: Annotated[bool, typer.Option(help="Also try other values of settings.")] = True,
    report: Annotated[Path | None, typer.Option(help=REPORT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    requests: Annotated[int, typer.Option(min=0, help="Number of requests from the start; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same plan.")] = 1,
) -> None:
    """Find how many members, and how many KV blocks in each, a trace needs to meet an objective.

    Every run is the whole trace through real schedulers and memories, with a clock that follows a profile of a machine.
    """
    from quire.errors import ConfigError

    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        message = f"expected --report in a folder that exists, got {report}; choose another path"
        raise ConfigError(message, code="report_without_folder")
    setup = _setup(fleet, trace, slo, requests, seed)
    name = trace.name.partition(".")[0]
    result = _run(setup, name, (members_max, pool_max), has_effects=effects, has_curves=report is not None)
    if report is not None:
        _write_page(report, result)
    if as_json:
        _print_json(result)
    else:
        _print_plan(result)
    if result.plan.num_members is None:
        raise typer.Exit(1)


def _setup(flags: FleetFlags, path: Path, slo: str, num_requests: int, seed: int) -> "PlanSetup":
    from quire.cli.sim.trace import open_trace, parse_shares
    from quire.engine.step_profile import StepProfile
    from quire.sim.planning.objectives import LatencyObjective
    from quire.sim.planning.planning import PlanSetup
    from quire.workload.trace_requests import TraceRules, trace_requests

    flags.check_policy()
    objective, profile = LatencyObjective.parse(slo), StepProfile.parse(flags.profile)
    rules = TraceRules(flags.speedup, flags.share, flags.tenants, parse_shares(flags.classes))
    trace = open_trace(path, num_requests)
    return PlanSetup(
        lambda: trace_requests(trace, rules),
        objective,
        profile,
        flags.member_size(),
        flags.policy,
        flags.gateways,
        report_age_s=flags.report_age_s,
        seed=seed,
    )


def _run(setup: "PlanSetup", name: str, sizes: tuple[int, int], *, has_effects: bool, has_curves: bool) -> "PlanResult":
    """Run all simulations; each prints a line to stderr when it is done."""
    from quire.checkpoints.progress import quiet, show_progress
    from quire.sim.planning.curves import plan_curves
    from quire.sim.planning.effects import setting_effects
    from quire.sim.planning.page import PlanResult
    from quire.sim.planning.planning import Planner

    members_max, pool_max = sizes
    # If stderr is not a terminal, one line per run is enough progress.
    with show_progress() if sys.stderr.isatty() else nullcontext(quiet) as progress:
        planner = Planner(setup, lambda done, total: progress("requests", done, total), _print_run)
        result = planner.plan(members_max, pool_max or None)
        # If no fleet meets the objective, effects and curves are computed for the largest fleet that was tried.
        fleet = (result.num_members or members_max, result.num_blocks or max(setup.size.num_blocks, pool_max))
        can_run = result.min_blocks <= fleet[1]
        effects = tuple(setting_effects(planner, *fleet)) if has_effects and can_run else ()
        curves = plan_curves(planner, *fleet, members_max) if has_curves and can_run else None
    size, profile = setup.size, setup.profile
    settings = (
        ("policy", setup.policy),
        ("gateways", f"{setup.num_gateways}"),
        ("tokens per block", f"{size.block_size:,}"),
        ("maximum tokens per step", f"{size.max_step_tokens:,}"),
        ("maximum milliseconds per step", f"{size.step_limit_s * 1000:,.0f}" if size.step_limit_s else "any"),
        ("maximum sequences that run at once", f"{size.max_running:,}"),
        ("simulations", f"{planner.num_runs:,}"),
        ("seed", f"{setup.seed}"),
    )
    return PlanResult(name, setup.objective, profile.name, profile.is_by_hand, settings, result, effects, curves)


def _print_run(line: str) -> None:
    # On a terminal the current line shows the progress bar; it is cleared, and the bar is redrawn on the next line.
    typer.echo(f"{CLEAR_LINE if sys.stderr.isatty() else ''}{line}", err=True)


def _write_page(path: Path, result: "PlanResult") -> None:
    from quire.errors import ConfigError
    from quire.sim.planning.page import plan_page

    try:
        path.write_text(plan_page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another path for --report") from error


def _print_json(result: "PlanResult") -> None:
    plan = result.plan
    content = {
        "trace": result.load,
        "objective": {limit.name: limit.limit_s for limit in result.objective.limits},
        "profile": result.profile,
        "is_profile_by_hand": result.is_by_hand,
        "num_requests": plan.facts.num_requests,
        "num_members": plan.num_members,
        "num_blocks": plan.num_blocks,
        "what_limits": plan.what_limits,
        "members": _minimum_json(plan.members),
        "pool": None if plan.pool is None else _minimum_json(plan.pool),
        "effects": [asdict(effect) for effect in result.effects],
        "curves": None if result.curves is None else asdict(result.curves),
    }
    typer.echo(json.dumps(content))


def _minimum_json(minimum: "Minimum") -> dict[str, object]:
    report, report_less = minimum.report, minimum.report_one_less
    return {
        "value": minimum.value,
        "report": None if report is None else report.as_json(),
        "one_less": minimum.one_less,
        "report_one_less": None if report_less is None else report_less.as_json(),
        "is_monotone": minimum.is_monotone,
        "trials": [[trial.num_members, trial.num_blocks, trial.is_met] for trial in minimum.trials],
    }


def _print_plan(result: "PlanResult") -> None:
    from quire.cli.shared.columns import columns
    from quire.sim.planning.page import answer_words, by_hand_words, effect_cells, less_words

    plan, objective = result.plan, result.objective
    typer.echo(f"{answer_words(plan)}\nobjective: {objective.words}")
    typer.echo(by_hand_words(result.profile) if result.is_by_hand else f"profile {result.profile}")
    for reason in plan.what_limits:
        typer.echo(f"- {reason}")
    searches = [("members", plan.members), *([("blocks", plan.pool)] if plan.pool is not None else [])]
    rows = [
        (
            unit,
            f"{minimum.value:,}",
            less_words(minimum, objective, unit) + ("" if minimum.is_monotone else " (not monotone)"),
        )
        for unit, minimum in searches
        if minimum.value is not None
    ]
    if rows:
        typer.echo("\n" + columns(("unit", "minimum", "one less"), rows, right=frozenset({1})))
    effect_rows = [
        (effect.setting, f"{effect.base} -> {effect.other}", *cells)
        for effect in result.effects
        for cells in effect_cells(effect) or [("", "", effect.reason, effect.verdict.value)]
    ]
    if effect_rows:
        typer.echo("\n" + columns(("setting", "A -> B", "mean of", "change", "interval", "verdict"), effect_rows))
