"""Strict parsing of JSON from clients: only finite numbers and no duplicate keys. Pure functions.

Python's parser silently accepts NaN, Infinity and duplicate keys. It builds all lists and objects in one call and
holds the GIL meanwhile. An empty list takes two bytes of input and costs as much as a hundred characters of a string,
so a body with a million lists blocks all other threads for half a second. Callers must count the lists first.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_JSON_LISTS = 50_000
"""Limit on the total number of lists and objects in one JSON text."""
_STRING_LITERALS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACES_TO_BRACKETS, _NON_BRACKETS = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def loads_strictly(data: bytes, parse_int: Callable[[str], int] = int) -> Any:
    """Parse JSON. Raises ValueError if it is invalid, or RecursionError if it is nested too deeply."""
    return json.loads(
        data.decode(),
        object_pairs_hook=_reject_duplicate_keys,
        parse_constant=_reject_constant,
        parse_float=_parse_finite,
        parse_int=parse_int,
    )


def brackets_of(data: bytes) -> bytes:
    """Return only a JSON text's brackets, outside strings, with `{}` replaced by `[]`; other characters are dropped."""
    return _STRING_LITERALS.sub(b"", data).translate(_BRACES_TO_BRACKETS, _NON_BRACKETS)


def has_too_many_lists(text: str) -> bool:
    """Return whether this JSON text has more lists and objects than `MAX_JSON_LISTS`."""
    if text.count("[") + text.count("{") <= MAX_JSON_LISTS:
        return False
    return brackets_of(text.encode("utf-8", "replace")).count(b"[") > MAX_JSON_LISTS


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        key = next(repr(name[:40]) for name in names if names.count(name) > 1) if len(names) < 1000 else "one"
        raise ValueError(f"expected unique keys in an object, got {key} twice")
    return value


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is outside the range of a float")
    return value
