"""What a setting may be: how its text is read, by which rule, and how its value is shown.

A kind reads what a flag, a variable or TOML gives, so that `32`, `"32"` and `--max-running 32` mean the same. It raises
a bare ValueError: who asked knows the setting's name and where the value came from, and says so with the rule.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from quire.config.machine import share_of_memory_bytes

Number = TypeVar("Number", int, float, Decimal)
Value = int | float | str | Path | None
MIB, GIB = 1 << 20, 1 << 30
MAX_TEXT_CHARACTERS = 4096
LEAST_SIZE_BYTES, LARGEST_SIZE_BYTES = MIB, 1 << 50
UNIT_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3}|%)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of value."""

    metavar: str
    """What stands for the value in help, such as `SIZE`."""
    rule: str
    """Completes the sentence "it must be ..."."""
    parse: Callable[[object], Value]
    """From what a source gives to the value; ValueError if it breaks the rule."""
    show: Callable[[Value], str] = str
    is_list: bool = False
    """Several may be given: a flag several times, a list in TOML, or all with commas between."""
    is_switch: bool = False
    """On a command line the flag alone is enough."""
    between: str = ","
    """What stands between several in one text."""


def whole_number(low: int, high: int) -> Kind:
    """A count from `low` to `high`."""
    return Kind("N", f"a whole number from {low:,} to {high:,}", lambda given: _between(_whole(given), low, high))


def power_of_two(high: int) -> Kind:
    """A size that divides evenly: 1, 2, 4, ... up to `high`."""
    return Kind("N", f"a power of two from 1 to {high:,}", lambda given: _one_bit(_between(_whole(given), 1, high)))


def seconds(high: float) -> Kind:
    """A duration from 0 up."""
    rule = f"a number of seconds from 0 to {high:,.0f}"
    return Kind("SECONDS", rule, lambda given: _between(_number(given), 0.0, high), lambda value: f"{value:g}")


def choice(*words: str) -> Kind:
    """One of a few words."""
    return Kind("NAME", f"one of {', '.join(words)}", lambda given: words[words.index(_text(given))])


def text(rule: str, pattern: str, metavar: str = "NAME") -> Kind:
    """A word of a certain form."""
    return Kind(metavar, rule, lambda given: _matching(_text(given), pattern))


def several(metavar: str, rule: str, pattern: str, fold: Callable[[str], str] = str.lower) -> Kind:
    """Words of a certain form, held as one text with commas between, in small letters unless told otherwise."""

    def parse(given: object) -> str:
        words = given if isinstance(given, list) else _text(given).split(",")
        return ",".join(_matching(fold(_text(word)), pattern) for word in words)

    return Kind(metavar, rule, parse, is_list=True)


def lines(metavar: str, rule: str, name: str, line: str) -> Kind:
    """Lines of a certain form, held as one text. A line of names with commas between counts as so many lines."""

    def parse(given: object) -> str:
        each = given if isinstance(given, list) else _text(given).split("\n")
        return "\n".join(_matching(one, line) for text in each for one in words(_text(text)))

    def words(text: str) -> list[str]:
        names = [word.strip() for word in text.split(",")]
        return names if all(re.fullmatch(name, word) for word in names) else [text]

    return Kind(metavar, rule, parse, lambda value: ", ".join(str(value).split("\n")), is_list=True, between="\n")


def _parse_size(given: object) -> int:
    if isinstance(given, int):
        return _between(_whole(given), LEAST_SIZE_BYTES, LARGEST_SIZE_BYTES)
    found = AMOUNT.fullmatch(_text(given))
    if found is None:
        raise ValueError
    amount, unit = Decimal(found[1]), found[2].lower()
    if unit == "%":
        return share_of_memory_bytes(float(_between(amount, Decimal(1), Decimal(100)) / 100))
    if unit not in UNIT_BYTES:
        raise ValueError
    return _between(int(amount * UNIT_BYTES[unit]), LEAST_SIZE_BYTES, LARGEST_SIZE_BYTES)


def show_size(num_bytes: Value) -> str:
    """A size as a person says it: `4 GiB`, `3.91 GiB`, `900.00 MiB`."""
    if not isinstance(num_bytes, int):
        raise ValueError(f"a size is a whole number of bytes, {num_bytes!r} given")
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    return f"{num_bytes // unit} {name}" if num_bytes % unit == 0 else f"{num_bytes / unit:.2f} {name}"


SIZE = Kind(
    "SIZE",
    "a size from 1MiB to 1024TiB with its unit, such as 4GiB or 900MB (without one, bytes are counted), "
    "or a share of the free memory from 1% to 100%",
    _parse_size,
    show_size,
)
FILE_PATH = Kind("FILE", "the path of a file", lambda given: Path(_matching(_text(given), r"[^\0]+")))


def _parse_switch(given: object) -> bool:
    return given if isinstance(given, bool) else _matching(_text(given).lower(), "true|false") == "true"


SWITCH = Kind("", "true or false", _parse_switch, lambda value: "true" if value else "false", is_switch=True)


def _text(given: object) -> str:
    if not isinstance(given, str | Path) or not 0 < len(str(given)) <= MAX_TEXT_CHARACTERS:
        raise ValueError
    return str(given).strip()


def _matching(given: str, pattern: str) -> str:
    if not re.fullmatch(pattern, given):
        raise ValueError
    return given


def _whole(given: object) -> int:
    if isinstance(given, bool):  # TOML's true is no 1
        raise ValueError
    return given if isinstance(given, int) else int(_matching(_text(given), r"[0-9]{1,18}"))


def _number(given: object) -> float:
    if isinstance(given, bool):
        raise ValueError
    value = float(given) if isinstance(given, int | float) else float(_matching(_text(given), r"[0-9.]{1,30}"))
    if not math.isfinite(value):
        raise ValueError
    return value


def _between(value: Number, low: Number, high: Number) -> Number:
    if not low <= value <= high:
        raise ValueError
    return value


def _one_bit(value: int) -> int:
    if value & (value - 1):
        raise ValueError
    return value
