"""Renders a plan as one self-contained HTML file, without scripts or external requests.

The result comes first, then a run with one member (or pool size) less, the effects of settings, and curves with tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from quire.sim.fleet.report import FleetReport
from quire.sim.planning.curves import CurvePoint, PlanCurves
from quire.sim.planning.effects import SettingEffect
from quire.sim.planning.objectives import LatencyObjective, latency_text
from quire.sim.planning.planning import CapacityPlan, Minimum
from quire.sim.planning.svg_plots import Plot, PlotLine, PlotMark, svg_plot
from quire.verdicts import change_rows

STYLE = """
:root{color-scheme:light dark;--ink:#1d1f23;--soft:#5b6069;--back:#fff;--edge:#d9dce1;--panel:#f5f6f8;
--one:#2f62b5;--two:#b3541e;--mark:#7a4d9e}
@media (prefers-color-scheme:dark){:root{--ink:#e7e9ec;--soft:#a3a9b3;--back:#15171a;--edge:#363a41;--panel:#1e2125;
--one:#7eaaf0;--two:#eb9a68;--mark:#c29be3}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:62rem;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.15rem;margin:0;color:var(--soft);font-weight:600;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem}
.answer{font-size:clamp(1.6rem,5vw,2.4rem);line-height:1.2;font-weight:700;margin:.4rem 0 .6rem;max-width:none}
p{margin:.4rem 0;max-width:44rem}
.soft{color:var(--soft)}
.note{border-left:4px solid var(--mark);background:var(--panel);padding:.5rem .8rem;margin:.8rem 0}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .65rem .3rem 0;border-bottom:1px solid var(--edge);white-space:nowrap}
td.words{white-space:normal;min-width:8rem}
th{color:var(--soft);font-weight:600}
td.number,th.number{text-align:right}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem 2rem}
figure{margin:0;min-width:0}
figcaption{font-weight:600}
svg{display:block;width:100%;max-width:34rem;height:auto;font:11.5px system-ui,sans-serif}
svg text{fill:var(--ink)}svg text.faint{fill:var(--mark);paint-order:stroke;stroke:var(--back);stroke-width:3px}
.grid{stroke:var(--edge)}.axis{stroke:var(--soft)}
.mark{stroke:var(--mark);stroke-dasharray:2 4;stroke-width:1.5}.gap{stroke:var(--ink);stroke-width:1.5;fill:none}
.line0{fill:none;stroke:var(--one);stroke-width:2}.dot0{fill:var(--one)}
.line1{fill:none;stroke:var(--two);stroke-width:2}.dot1{fill:var(--two)}
"""
STOPPED_EARLY = "stopped early"
LATENCY_OF = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT"}
EFFECTS_WORDS = (
    "The same requests at the same times, with the current value of the setting (A) and with another value (B). "
    "Batches of consecutive requests are compared as <code>quire bench compare</code> compares rounds."
)


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The content of a page."""

    load: str
    """Name of the trace."""
    objective: LatencyObjective
    profile: str
    is_by_hand: bool
    settings: tuple[tuple[str, str], ...]
    """Fixed settings and their values, as text."""
    plan: CapacityPlan
    effects: tuple[SettingEffect, ...] = ()
    curves: PlanCurves | None = None


def plan_page(result: PlanResult) -> str:
    """Return the HTML document."""
    plan = result.plan
    body = [
        f"<h1>Capacity plan for {escape(result.load)}</h1>",
        f'<p class="answer">{escape(answer_words(plan))}</p>',
        f"<p>Objective: {escape(result.objective.words)}.</p>",
        f'<p class="soft">{plan.facts.num_requests:,} requests over {plan.facts.last_arrival_s:,.0f} s.</p>',
    ]
    if result.is_by_hand:
        body.append(f'<p class="note">{escape(by_hand_words(result.profile))}</p>')
    body += [f'<p class="note">{escape(reason)}.</p>' for reason in plan.what_limits]
    note = f"“{STOPPED_EARLY}”: the run ended as soon as the objective was certain to be missed."
    body.append(f'<p class="soft">{note}</p>')
    body += _search("Members", plan.members, result.objective, "members", f"of {_pool_words(plan)}")
    if plan.pool is not None:
        number = plan.num_members or "the most"
        body += _search("Pool of each member", plan.pool, result.objective, "blocks", f"with {number} members")
    body += _effects(result.effects)
    body += _curves(result)
    body.append("<h2>Runs</h2>")
    body.append(_table(("setting", "value"), [(*row,) for row in (("profile", result.profile), *result.settings)]))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    title = f"<title>Capacity plan: {escape(result.load)}</title>"
    content = f"<head>{head}{title}<style>{STYLE}</style></head><body>{''.join(body)}</body>"
    return f'<!doctype html><html lang="en">{content}</html>\n'


def answer_words(plan: CapacityPlan) -> str:
    """Return the result as one line of text."""
    if plan.num_members is None or plan.num_blocks is None:
        return "No tried configuration meets the objective"
    return f"{_count_text(plan.num_members, 'member')} with {plan.num_blocks:,} KV blocks each"


def by_hand_words(profile: str) -> str:
    """Return a note that the profile was written by hand, not measured."""
    return f"Profile {profile}: not measured. Times are those of an assumed machine; give --profile for yours."


def less_words(minimum: Minimum, objective: LatencyObjective, unit: str) -> str:
    """Return what a fleet with one member (or pool size) less misses, as one line of text."""
    if minimum.one_less is None or minimum.report_one_less is None:
        return "no smaller value can be tried"
    return f"{_count_text(minimum.one_less, unit[:-1])}: {', '.join(objective.misses(minimum.report_one_less))}"


def _pool_words(plan: CapacityPlan) -> str:
    trials = plan.members.trials
    return f"{trials[0].num_blocks:,} blocks" if trials else "any pool"


def _search(title: str, minimum: Minimum, objective: LatencyObjective, unit: str, context: str) -> list[str]:
    if not minimum.trials:
        return []
    parts = [f"<h2>{title}</h2>"]
    if minimum.value is not None:
        parts.append(f"<p>At least <strong>{minimum.value:,}</strong> {unit} {escape(context)}.</p>")
        parts.append(f"<p>One less: {escape(less_words(minimum, objective, unit))}.</p>")
    if not minimum.is_monotone:
        parts.append(
            '<p class="note">More is not always better here: a value below the answer meets the objective, and a '
            "larger one misses it.</p>"
        )
    rows = []
    for trial in minimum.trials:
        value = trial.num_members if unit == "members" else trial.num_blocks
        report = trial.report
        if report is None and value == minimum.one_less:
            report = minimum.report_one_less
        metrics = ("", "", "", "") if report is None else _metric_cells(report)
        verdict = "meets it" if trial.is_met else "misses it" if report is not None else STOPPED_EARLY
        rows.append((f"{value:,}", verdict, *metrics))
    parts.append(_table((unit, "objective", "TTFT p95", "TPOT p95", "reused", "busy"), rows, right={0, 2, 3, 4, 5}))
    return parts


def _effects(effects: Sequence[SettingEffect]) -> list[str]:
    if not effects:
        return []
    rows: list[tuple[str, ...]] = []
    for effect in effects:
        setting = f"{effect.setting}: {effect.base} → {effect.other}"
        hit_rates = "" if effect.hit_rate_other is None else f"{effect.hit_rate_base:.1%} → {effect.hit_rate_other:.1%}"
        for change, (latency, change_text, interval, verdict) in zip(effect.changes, effect_cells(effect), strict=True):
            means = f"{change.a:,.0f} → {change.b:,.0f}"
            rows.append((setting, latency, verdict, change_text, interval, means, hit_rates))
        if not effect.changes:
            rows.append((setting, "", f"{effect.verdict.value}: {effect.reason}", "", "", "", ""))
    header = ("setting: A → B", "mean of", "verdict", "change", "between", "ms", "reused")
    return ["<h2>Effects of settings</h2>", f"<p>{EFFECTS_WORDS}</p>", _table(header, rows, right={3, 5})]


def effect_cells(effect: SettingEffect) -> list[tuple[str, str, str, str]]:
    """Return latency, change, interval and verdict as text, for each change."""
    return [(LATENCY_OF[row[0]], row[3], row[4], row[6]) for row in change_rows(effect.changes)]


def _curves(result: PlanResult) -> list[str]:
    if result.curves is None:
        return []
    plan, curves = result.plan, result.curves
    objective_marks = [
        PlotMark(f"objective {latency_text('ttft', limit.limit_s)}", limit.limit_s, is_horizontal=True)
        for limit in result.objective.limits
        if limit.latency == "ttft" and limit.percent == 95
    ]
    is_met = plan.num_members is not None and plan.num_blocks is not None
    at_pool = [PlotMark("answer", float(plan.num_blocks or 0))] if is_met else []
    at_members = [PlotMark("answer", float(plan.num_members or 0))] if is_met else []
    figures = (
        _figure(
            "Prompt tokens reused over the pool",
            ("size of the pool, blocks", "share reused, %"),
            curves.over_pool,
            {"reused": [_percent(point.hit_rate) for point in curves.over_pool]},
            at_pool,
        ),
        _figure(
            "First token over load",
            ("times the load", "TTFT, s"),
            curves.over_load,
            {
                "p50": [point.ttft_p50_s for point in curves.over_load],
                "p95": [point.ttft_p95_s for point in curves.over_load],
            },
            objective_marks,
        ),
        _figure(
            "Imbalance over members",
            ("members", "most work over mean"),
            curves.over_members,
            {"imbalance": [point.imbalance for point in curves.over_members]},
            at_members,
        ),
    )
    return [
        "<h2>Curves</h2>",
        '<p class="soft">Over load and members, runs stop early when ten times the objective is missed.</p>',
        f'<div class="curves">{"".join(figures)}</div>',
    ]


def _figure(
    title: str,
    axes: tuple[str, str],
    points: Sequence[CurvePoint],
    lines: dict[str, list[float | None]],
    marks: Sequence[PlotMark],
) -> str:
    xs = [point.x for point in points]
    plot_lines = [PlotLine(name, values) for name, values in lines.items()]
    svg = svg_plot(Plot(title, axes[0], axes[1], xs, plot_lines, marks, gap_words=STOPPED_EARLY))
    unit = axes[1].rpartition(", ")[2]
    header = (axes[0].split()[-1], *(f"{name}, {unit}" if len(lines) > 1 else axes[1] for name in lines), "busy")
    rows = [
        (
            f"{point.x:,.6g}",
            *(STOPPED_EARLY if values[index] is None else f"{values[index]:,.4g}" for values in lines.values()),
            "" if point.utilisation is None else f"{point.utilisation:.0%}",
        )
        for index, point in enumerate(points)
    ]
    table = _table(header, rows, right=set(range(len(header))))
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{table}</figure>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: set[int] | frozenset[int] = frozenset()) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{_cell_class(index in right, text)}>{escape(text)}</{kind}>" for index, text in enumerate(row)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell_class(is_number: bool, text: str) -> str:
    if is_number:
        return ' class="number"'
    return ' class="words"' if len(text) > 24 else ""


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100.0


def _metric_cells(report: FleetReport) -> tuple[str, str, str, str]:
    ttft, tpot = latency_text("ttft", report.ttft_s.p95), latency_text("tpot", report.tpot_s.p95)
    return ttft, tpot, f"{report.hit_rate:.1%}", f"{report.utilisation:.0%}"
