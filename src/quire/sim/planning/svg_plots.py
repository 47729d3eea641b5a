"""Draws a plot as self-contained SVG: no scripts, external fonts or images.

The page defines the colours, light or dark. Lines differ not only by colour: each has its own marker and dash pattern,
and its name at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 66, 18, 48
"""Margins for: tick labels and name of the y axis; line names; none; tick labels and name of the x axis."""
NUM_TICKS = 4
LABEL_WIDTH = 7.0
"""Width of one character of a label."""
LINE_HEIGHT = 13.0
DASHES = ("", "6 4", "2 3")


@dataclass(frozen=True, slots=True)
class PlotLine:
    """A line with its name and its value for each x; None: no value."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class PlotMark:
    """A labelled line across the plot at one x or, if horizontal, y, such as the objective or the plan's result."""

    name: str
    position: float
    is_horizontal: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over x, with the names and units of both axes."""

    title: str
    x_name: str
    y_name: str
    xs: Sequence[float]
    lines: Sequence[PlotLine]
    marks: Sequence[PlotMark] = ()
    gap_words: str = ""
    """Label of x values at which no line has a value."""


def svg_plot(plot: Plot) -> str:
    """Return the plot as an SVG element."""
    values = [value for line in plot.lines for value in line.values if value is not None]
    ticks = nice_ticks(max([*values, *(mark.position for mark in plot.marks if mark.is_horizontal)], default=1.0))
    scale = _Scale(min(plot.xs), max(plot.xs), ticks[-1])
    # Labels of marks are drawn after the lines, so that no line covers them.
    parts = [*_axes(plot, scale, ticks), *_lines(plot, scale), *_marks(plot, scale), *_gaps(plot, scale)]
    name = escape(plot.title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}"><title>{name}</title>'
        + "".join(parts)
        + "</svg>"
    )


def nice_ticks(highest: float) -> list[float]:
    """Return ticks from 0 to at least `highest`, in steps of 1, 2 or 5 times a power of ten."""
    min_step = (highest or 1.0) / NUM_TICKS
    power = 10.0 ** floor(log10(min_step))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= min_step * 0.999)
    return [number * step for number in range(ceil(highest / step - 1e-9) + 1)] if highest > 0 else [0.0, step]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to coordinates. x is logarithmic if its values span more than a factor of five."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        if self.high == self.low:
            fraction = 0.5
        elif self.low > 0 and self.high / self.low > 5.0:
            fraction = log10(value / self.low) / log10(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return LEFT + 8 + fraction * (WIDTH - LEFT - RIGHT - 16)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def _axes(plot: Plot, scale: _Scale, ticks: Sequence[float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:,.6g}", "end"))
    last_label_end = -1e9
    for value in sorted(set(plot.xs)):
        x, label = scale.x(value), f"{value:,.6g}"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        half_width = len(label) * LABEL_WIDTH / 2
        if x - half_width > last_label_end:
            parts.append(_text(x, bottom + 17, label, "middle"))
            last_label_end = x + half_width + 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, plot.x_name, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{escape(plot.y_name)}</text>"
    )
    return parts


def _marks(plot: Plot, scale: _Scale) -> list[str]:
    parts = []
    for mark in plot.marks:
        if mark.is_horizontal:
            y = scale.y(mark.position)
            parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(LEFT + 4, y - 4, mark.name, "start", "faint"))
        else:
            x = scale.x(mark.position)
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}"/>')
            is_right = x > (LEFT + WIDTH - RIGHT) / 2
            parts.append(
                _text(x - 4 if is_right else x + 4, TOP + 4, mark.name, "end" if is_right else "start", "faint")
            )
    return parts


def _gaps(plot: Plot, scale: _Scale) -> list[str]:
    """Draw a cross at the upper edge where no line has a value, and one label."""
    gap_xs = [x for index, x in enumerate(plot.xs) if all(line.values[index] is None for line in plot.lines)]
    parts = []
    for gap_x in gap_xs:
        x, y = scale.x(gap_x), TOP + 16.0
        parts.append(f'<path class="gap" d="M{x - 4:.1f} {y - 4} l8 8 m0 -8 l-8 8"/>')
    if gap_xs and plot.gap_words:
        parts.append(_text(scale.x(gap_xs[-1]) + 7, TOP + 20, plot.gap_words, "start", "faint"))
    return parts


def _lines(plot: Plot, scale: _Scale) -> list[str]:
    parts, ends = [], []
    for number, line in enumerate(plot.lines):
        points = [
            (scale.x(x), scale.y(value)) for x, value in zip(plot.xs, line.values, strict=True) if value is not None
        ]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = DASHES[number % len(DASHES)]
        style = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline class="line{number}" points="{path}"{style}/>')
        parts += [_marker(number, x, y) for x, y in points]
        ends.append((points[-1][1], points[-1][0], line.name))
    # Names are drawn one below another where the ends of lines are close together.
    last_label_y = -1e9
    for y, x, name in sorted(ends):
        label_y = max(y + 4, last_label_y + LINE_HEIGHT)
        parts.append(_text(x + 8, label_y, name, "start"))
        last_label_y = label_y
    return parts


def _marker(number: int, x: float, y: float) -> str:
    shape = number % 3
    if shape == 0:
        return f'<circle class="dot{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    if shape == 1:
        return f'<rect class="dot{number}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    return f'<path class="dot{number}" d="M{x:.1f} {y - 4.5:.1f} l4.5 8 h-9 z"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
