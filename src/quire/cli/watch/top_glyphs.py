"""Bars and curves of `quire top`, in Unicode or ASCII.

Each block state has its own character in addition to its colour, so that the output is readable without colours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from rich.text import Text

from quire.core.inspect.snapshots import CellCounts

STYLES: Mapping[str, str] = MappingProxyType(
    {
        "free": "bright_black",
        "cached": "blue",
        "used": "green",
        "shared": "magenta",
        "pinned": "yellow",
        "computing": "cyan",
    }
)


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars and curves."""

    states: Mapping[str, str]
    levels: str
    """The characters of a curve, from empty to full."""
    line: str
    is_ascii: bool
    """True if the terminal shows only ASCII."""

    @classmethod
    def for_encoding(cls, encoding: str) -> "Glyphs":
        """Return the glyphs for a terminal with this encoding."""
        return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


UNICODE = Glyphs(
    MappingProxyType({"free": "·", "cached": "░", "used": "▒", "shared": "▓", "pinned": "█", "computing": "+"}),
    " ▁▂▃▄▅▆▇█",
    "─",
    is_ascii=False,
)
ASCII = Glyphs(
    MappingProxyType({"free": ".", "cached": ":", "used": "o", "shared": "#", "pinned": "@", "computing": "+"}),
    " .-:=+*#@",
    "-",
    is_ascii=True,
)


def bar(counts: CellCounts, width: int, glyphs: Glyphs) -> Text:
    """Draw the block pool as one line; each state that occurs gets at least one character."""
    line = Text(no_wrap=True)
    values = [max(0, int(getattr(counts, state))) for state in STYLES]
    for (state, glyph), num_cells in zip(glyphs.states.items(), proportional_widths(values, width), strict=True):
        line.append(glyph * num_cells, STYLES[state])
    return line


def proportional_widths(values: Sequence[int], width: int) -> list[int]:
    """Divide `width` characters in proportion to the values; each value above 0 gets at least one."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    widths = [max(1, width * value // total) if value else 0 for value in values]
    while sum(widths) > width:
        largest = max(range(len(widths)), key=widths.__getitem__)
        if widths[largest] <= 1:
            break
        widths[largest] -= 1
    order = sorted(range(len(values)), key=lambda index: width * values[index] % total, reverse=True)
    for index in order[: max(0, width - sum(widths))]:
        widths[index] += 1
    return widths


def history_curve(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """Draw values as a one-line curve, scaled to the maximum, the latest at the right; long series are averaged."""
    if not values or width <= 0:
        return ""
    size = ceil(len(values) / width)
    first_size = len(values) % size
    groups = [values[:first_size]] if first_size else []
    groups += [values[start : start + size] for start in range(first_size, len(values), size)]
    means = [_mean(group) for group in groups]
    maximum = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(_level(mean, maximum, glyphs.levels) for mean in means).rjust(width)


def _mean(group: Sequence[float | None]) -> float | None:
    numbers = [value for value in group if value is not None]
    # The mean of the smallest floats may be rounded to 0; then their maximum is used.
    return (sum(numbers) / len(numbers) or max(numbers)) if numbers else None


def _level(value: float | None, maximum: float, levels: str) -> str:
    """Return the character for a value; a value above 0 is never drawn as empty."""
    if value is None or value <= 0 or maximum <= 0:
        return levels[0]
    return levels[max(1, min(len(levels) - 1, round(value / maximum * (len(levels) - 1))))]
