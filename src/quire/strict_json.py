"""JSON from outside: bounded, finite, without doubled keys. Pure.

Python's parser accepts NaN, Infinity and doubled keys silently. It makes all lists and objects of a text in one go and
holds the interpreter's lock meanwhile, and a list costs as much as a hundred characters of a text: two bytes each, a
body has a million, and every other thread waits for half a second. So they are counted before one is made.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_JSON_LISTS = 50_000
"""Lists and objects in one JSON text."""
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_AS_LISTS, _ALL_ELSE = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def loads_strictly(data: bytes, parse_int: Callable[[str], int] = int) -> Any:
    """What these bytes spell. Raises ValueError or RecursionError."""
    return json.loads(
        data.decode(),
        object_pairs_hook=_without_doubles,
        parse_constant=_refuse,
        parse_float=_finite,
        parse_int=parse_int,
    )


def brackets_of(data: bytes) -> bytes:
    """Where lists and objects begin and end, all written as lists; what stands in texts is none."""
    return _TEXTS.sub(b"", data).translate(_AS_LISTS, _ALL_ELSE)


def has_too_many_lists(text: str) -> bool:
    """Whether it is not to be read."""
    if text.count("[") + text.count("{") <= MAX_JSON_LISTS:
        return False
    return brackets_of(text.encode("utf-8", "replace")).count(b"[") > MAX_JSON_LISTS


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "one"
        raise ValueError(f"the key {twice[:40]!r} appears twice in one object")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is outside the range of a float")
    return value
