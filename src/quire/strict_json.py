"""Strict parsing of JSON from clients: bounded, only finite numbers, no duplicate keys. Pure functions.

Python's parser silently accepts NaN, Infinity and duplicate keys. It builds all lists and objects in one call and
holds the GIL meanwhile. An empty list takes two bytes of input and costs as much as a hundred characters of a string,
so a body with a million lists blocks all other threads for half a second. Therefore lists are counted before parsing.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_JSON_LISTS = 50_000
"""Limit on the lists and objects of one JSON text, together."""
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_AS_LISTS, _ALL_ELSE = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def loads_strictly(data: bytes, parse_int: Callable[[str], int] = int) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, or RecursionError if it is nested too deeply."""
    return json.loads(
        data.decode(),
        object_pairs_hook=_without_doubles,
        parse_constant=_refuse,
        parse_float=_finite,
        parse_int=parse_int,
    )


def brackets_of(data: bytes) -> bytes:
    """Return only the brackets of lists and objects, objects written as lists; brackets inside strings are left out."""
    return _TEXTS.sub(b"", data).translate(_AS_LISTS, _ALL_ELSE)


def has_too_many_lists(text: str) -> bool:
    """Return whether this JSON text has more lists and objects than `MAX_JSON_LISTS`."""
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
