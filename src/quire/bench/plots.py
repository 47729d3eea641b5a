"""Plots of results as PNG files. The only module that uses matplotlib, which is imported when a plot is drawn.

curve      throughput and latency by number of clients
timeline   waiting and output time of each request, with tokens per second below
batches    the engine's tokens per second by batch size, with the roofline
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from quire.bench.outcome import Outcome, Run
from quire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAITING, OUTPUT, FAILED, TEXT, GRID = "#e3b778", "#3b6fb6", "#c2384a", "#2b2b2b", "#d9d9d9"
DOTS_PER_INCH = 150
MIN_TOKENS_PER_SLICE = 8
MAX_ROWS = 400
"""Maximum number of requests in a timeline; if there are more, every n-th is drawn."""


def curve(path: Path, points: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw output throughput, TTFT and TPOT over the number of clients."""
    figure = _figure(12.5, 4.3, title)
    panels = figure.subplots(1, 3)
    clients = [point["max_concurrency"] for point in points]
    panels[0].plot(clients, [point["output_throughput"] for point in points], "o-", color=OUTPUT)
    for panel, name in ((panels[1], "ttft"), (panels[2], "tpot")):
        _plot_median_to_p99(panel, clients, points, name)
    titles = (
        "output tokens per second",
        "ms to the first token (median; shaded up to p99)",
        "ms per output token (median; shaded up to p99)",
    )
    for panel, panel_title in zip(panels, titles, strict=True):
        _style_client_axis(panel, sorted({*clients}), panel_title)
    _write(figure, path)


def timeline(path: Path, run: Run, title: str) -> None:
    """Draw a bar for each request, from its start: waiting, then output; below, tokens per second."""
    ordered = sorted(run.outcomes, key=lambda outcome: outcome.sent_s)
    step = -(-len(ordered) // MAX_ROWS) or 1
    outcomes = ordered[::step]
    figure = _figure(10.0, min(9.0, 3.2 + 0.06 * len(outcomes)), title)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for row, outcome in enumerate(outcomes):
        _draw_request(upper, row, outcome, run.started_s)
    upper.set_ylim(len(outcomes) - 0.5, -0.5)
    upper.set_ylabel("requests" if step == 1 else f"requests (every {step}th)")
    _legend(upper, any(not outcome.is_ok for outcome in outcomes))
    times, rates = _rates(run)
    lower.fill_between(times, rates, step="post", color=OUTPUT, alpha=0.25, linewidth=0)
    lower.step(times, rates, where="post", color=OUTPUT, linewidth=1.2)
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, max(run.duration_s, 1e-3))
    lower.set_ylabel("tokens/s")
    lower.set_xlabel("seconds")
    for panel in (upper, lower):
        _style_axes(panel)
    _write(figure, path)


def batch_plot(path: Path, record: Mapping[str, Any]) -> None:
    """Draw tokens per second by batch size, with the roofline above."""
    points = record["batches"]
    figure = _figure(7.5, 4.4, f"{record['model']}: effect of batching")
    panel = figure.subplots()
    rates = [point["decode_tokens_per_s"] for point in points]
    roofs = [point.get("roof_tokens_per_s") for point in points]
    positions = range(len(points))
    panel.bar(positions, rates, color=OUTPUT, width=0.62, label="decoding", zorder=2)
    if all(roofs):
        panel.plot(positions, roofs, "_", color=TEXT, markersize=26, markeredgewidth=2, label="roofline", zorder=3)
    single_rate = rates[0] / points[0]["batch"]
    panel.set_xticks(
        positions, [f"{point['batch']}\n{rate / single_rate:.1f} x" for point, rate in zip(points, rates, strict=True)]
    )
    panel.set_xlabel("concurrent requests, and speedup over one")
    panel.set_ylabel("output tokens per second")
    panel.legend(frameon=False, loc="upper left")
    _style_axes(panel)
    panel.grid(axis="y", color=GRID, linewidth=0.6, zorder=0)
    _write(figure, path)


def _figure(width: float, height: float, title: str) -> "Figure":
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - needed only to draw
    except ImportError as error:
        message = "expected matplotlib for a plot, got no such module; run: pip install 'matplotlib>=3.9,<4'"
        raise ConfigError(message, code="matplotlib_missing") from error
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)  # type: ignore[union-attr,call-arg]
    lines = [shorten(line, int(9 * width), placeholder=" ...") for line in title.splitlines()]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=12.5, color=TEXT)
    return figure


def _write(figure: "Figure", path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; pass another path to --plot") from error


def _style_axes(panel: "Axes") -> None:
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color("#999999")
    panel.tick_params(colors="#555555", labelsize=9)


def _style_client_axis(panel: "Axes", clients: Sequence[int], title: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(clients, [str(count) for count in clients])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("clients")
    panel.set_title(title, fontsize=10, color=TEXT, loc="left", pad=8)
    panel.grid(axis="y", color=GRID, linewidth=0.6)
    _style_axes(panel)


def _plot_median_to_p99(panel: "Axes", clients: Sequence[int], points: Sequence[Mapping[str, Any]], name: str) -> None:
    median = [point[f"median_{name}_ms"] or 0.0 for point in points]
    slow = [point[f"p99_{name}_ms"] or 0.0 for point in points]
    panel.plot(clients, median, "o-", color=OUTPUT)
    panel.fill_between(clients, median, slow, color=OUTPUT, alpha=0.15, linewidth=0)


def _draw_request(panel: "Axes", row: int, outcome: Outcome, started_s: float) -> None:
    sent = outcome.sent_s - started_s
    if not outcome.is_ok:
        panel.plot([sent], [row], "x", color=FAILED, markersize=4)
        return
    first, last = outcome.token_s[0] - started_s, outcome.token_s[-1] - started_s
    panel.broken_barh(
        [(sent, first - sent), (first, max(last - first, 1e-4))], (row - 0.4, 0.8), facecolors=(WAITING, OUTPUT)
    )


def _legend(panel: "Axes", has_failed: bool) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - needed only to draw
    from matplotlib.patches import Patch  # noqa: PLC0415 - needed only to draw

    handles: list[Any] = [Patch(color=WAITING, label="time to first token"), Patch(color=OUTPUT, label="output")]
    if has_failed:
        handles.append(Line2D([], [], color=FAILED, marker="x", linestyle="", label="failed"))
    panel.legend(handles=handles, frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)


def _rates(run: Run) -> tuple[list[float], list[float]]:
    """Return tokens per second in equal slices of the run, each wide enough for several tokens."""
    num_tokens = sum(outcome.output_tokens for outcome in run.outcomes if outcome.is_ok)
    slice_s = max(run.duration_s / 120.0, 0.05, run.duration_s * MIN_TOKENS_PER_SLICE / max(1, num_tokens))
    counts = [0.0] * (int(run.duration_s / slice_s) + 1)
    for outcome in run.outcomes:
        if outcome.is_ok:
            for moment_s in outcome.token_s:
                counts[int((moment_s - run.started_s) / slice_s)] += outcome.output_tokens / len(outcome.token_s)
    times = [index * slice_s for index in range(len(counts) + 1)]
    return times, [*(count / slice_s for count in counts), 0.0]
