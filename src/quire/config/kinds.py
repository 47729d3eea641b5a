"""Types of settings: how a text is parsed, the rule for valid values, and how a value is shown.

A `Kind` parses values from flags, variables and TOML, so that `32`, `"32"` and `--max-running 32` mean the same. It
raises a bare ValueError; the caller adds the setting's name, its source and the rule to the message.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from quire.config.machine import memory_budget_bytes

Number = TypeVar("Number", int, float, Decimal)
Value = int | float | str | Path | None
MIB, GIB = 1 << 20, 1 << 30
MAX_TEXT_CHARACTERS = 4096
MIN_SIZE_BYTES, MAX_SIZE_BYTES = MIB, 1 << 50
UNIT_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3}|%)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of value."""

    metavar: str
    """The placeholder in help, such as `SIZE`."""
    rule: str
    """Completes the sentence "it must be ..."."""
    parse: Callable[[object], Value]
    """Parses a raw value; raises ValueError if it breaks the rule."""
    show: Callable[[Value], str] = str
    is_list: bool = False
    """Takes several values, as a repeated flag, a list in TOML, or one text with separators."""
    is_switch: bool = False
    """The command-line flag takes no value."""
    separator: str = ","
    """Separator of several values in one text."""


def whole_number(low: int, high: int) -> Kind:
    """An integer from `low` to `high`."""
    return Kind("N", f"a whole number from {low:,} to {high:,}", lambda raw: _in_range(_integer(raw), low, high))


def power_of_two(high: int) -> Kind:
    """A power of two: 1, 2, 4, ... up to `high`."""
    return Kind("N", f"a power of two from 1 to {high:,}", lambda raw: _single_bit(_in_range(_integer(raw), 1, high)))


def seconds(high: float) -> Kind:
    """A duration from 0 to `high` seconds."""
    rule = f"a number of seconds from 0 to {high:,.0f}"
    return Kind("SECONDS", rule, lambda raw: _in_range(_number(raw), 0.0, high), lambda value: f"{value:g}")


def fraction() -> Kind:
    """A number from 0 to 1."""
    return Kind("N", "a number from 0 to 1", lambda raw: _in_range(_number(raw), 0.0, 1.0), lambda value: f"{value:g}")


def choice(*words: str) -> Kind:
    """One of these words."""
    return Kind("NAME", f"one of {', '.join(words)}", lambda raw: words[words.index(_text(raw))])


def text(rule: str, pattern: str, metavar: str = "NAME") -> Kind:
    """A text that matches `pattern`."""
    return Kind(metavar, rule, lambda raw: _match(_text(raw), pattern))


def several(metavar: str, rule: str, pattern: str, fold: Callable[[str], str] = str.lower) -> Kind:
    """Words that match `pattern`, as one comma-separated text. `fold` normalizes a word, by default to lower case."""

    def parse(raw: object) -> str:
        words = raw if isinstance(raw, list) else _text(raw).split(",")
        return ",".join(_match(fold(_text(word)), pattern) for word in words)

    return Kind(metavar, rule, parse, is_list=True)


def lines(metavar: str, rule: str, name: str, line: str) -> Kind:
    """Lines that match `line`, as one text. A line of comma-separated words that match `name` is split at commas."""

    def parse(raw: object) -> str:
        texts = raw if isinstance(raw, list) else _text(raw).split("\n")
        return "\n".join(_match(part, line) for text in texts for part in split_names(_text(text)))

    def split_names(text: str) -> list[str]:
        names = [word.strip() for word in text.split(",")]
        return names if all(re.fullmatch(name, word) for word in names) else [text]

    return Kind(metavar, rule, parse, lambda value: ", ".join(str(value).split("\n")), is_list=True, separator="\n")


def _parse_size(raw: object) -> int:
    if isinstance(raw, int):
        return _in_range(_integer(raw), MIN_SIZE_BYTES, MAX_SIZE_BYTES)
    match = AMOUNT.fullmatch(_text(raw))
    if match is None:
        raise ValueError
    amount, unit = Decimal(match[1]), match[2].lower()
    if unit == "%":
        return memory_budget_bytes(float(_in_range(amount, Decimal(1), Decimal(100)) / 100))
    if unit not in UNIT_BYTES:
        raise ValueError
    return _in_range(int(amount * UNIT_BYTES[unit]), MIN_SIZE_BYTES, MAX_SIZE_BYTES)


def show_size(num_bytes: Value) -> str:
    """Format a size: `4 GiB`, `3.91 GiB`, `900.50 MiB`."""
    if not isinstance(num_bytes, int):
        raise ValueError(f"expected a whole number of bytes, got {num_bytes!r}")
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    return f"{num_bytes // unit} {name}" if num_bytes % unit == 0 else f"{num_bytes / unit:.2f} {name}"


SIZE = Kind(
    "SIZE",
    "a size from 1MiB to 1024TiB with its unit, such as 4GiB or 900MB (without a unit: bytes), "
    "or a share of the free memory from 1% to 100%",
    _parse_size,
    show_size,
)
FILE_PATH = Kind("FILE", "the path of a file", lambda raw: Path(_match(_text(raw), r"[^\0]+")))


def _parse_switch(raw: object) -> bool:
    return raw if isinstance(raw, bool) else _match(_text(raw).lower(), "true|false") == "true"


SWITCH = Kind("", "true or false", _parse_switch, lambda value: "true" if value else "false", is_switch=True)


def _text(raw: object) -> str:
    if not isinstance(raw, str | Path) or not 0 < len(str(raw)) <= MAX_TEXT_CHARACTERS:
        raise ValueError
    return str(raw).strip()


def _match(raw: str, pattern: str) -> str:
    if not re.fullmatch(pattern, raw):
        raise ValueError
    return raw


def _integer(raw: object) -> int:
    if isinstance(raw, bool):  # TOML's true is not 1
        raise ValueError
    return raw if isinstance(raw, int) else int(_match(_text(raw), r"[0-9]{1,18}"))


def _number(raw: object) -> float:
    if isinstance(raw, bool):
        raise ValueError
    value = float(raw) if isinstance(raw, int | float) else float(_match(_text(raw), r"[0-9.]{1,30}"))
    if not math.isfinite(value):
        raise ValueError
    return value


def _in_range(value: Number, low: Number, high: Number) -> Number:
    if not low <= value <= high:
        raise ValueError
    return value


def _single_bit(value: int) -> int:
    if value & (value - 1):
        raise ValueError
    return value
