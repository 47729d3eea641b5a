"""Field names in bodies: each is read, refused, or ignored and reported in a response header.

read by the dialect                          used, or refused by name
used by other servers and SDKs               ignored and reported
at least 5 letters, and one edit away from   refused; the error names the intended field
  a name that is read
any other                                    ignored and reported
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.api.dialects.foreign_fields import ALL_FOREIGN
from quire.api.http.errors import ApiError, invalid, printable_name, shortened

MIN_CHECKED_CHARS = 5
"""Shorter names are not checked for misspelling: too many valid words are one edit away."""
MAX_IGNORED = 512
"""Maximum number of unknown names in one body; twice as many as all tables of names here have together."""
MAX_HEADER_CHARS = 4096
HEADER = b"x-quire-ignored"


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The field names of one kind of object."""

    read: frozenset[str]
    """Names that the dialect reads: it uses them, or refuses them by name."""
    nested: Mapping[str, "FieldNames"] = field(default_factory=dict)
    """By field name: the names allowed in the objects of that field (one object, or a list)."""
    types: tuple[str | None, ...] = ()
    """Objects with a `type` that is not listed are ignored as a whole, for example tools that the server does not run.
    Empty: all types are read."""
    is_open: bool = False
    """Whether other fields are passed on, for example to a chat template, and not reported as ignored."""


def names(words: str, **nested: FieldNames) -> FieldNames:
    """Return the field names in a space-separated string, and those with nested names."""
    return FieldNames(frozenset((*words.split(), *nested)), nested)


def ignored_names(body: Mapping[str, Any], allowed: FieldNames) -> tuple[str, ...]:
    """Return the names in a body that no dialect reads, nested ones with dots. Raises ApiError for a misspelt name."""
    ignored: dict[str, None] = {}
    _collect(body, allowed, "", ignored)
    return tuple(ignored)


def _collect(body: Mapping[str, Any], allowed: FieldNames, prefix: str, ignored: dict[str, None]) -> None:
    if allowed.types and (kind := body.get("type")) not in allowed.types:
        if not allowed.is_open:
            _add(f"{prefix}type={shortened(kind)}", ignored)
        return
    for name, value in body.items():
        if name in allowed.read:
            _collect_nested(value, allowed.nested.get(name), f"{prefix}{name}.", ignored)
            continue
        path = prefix + name
        if path in ignored:
            continue
        if (intended := _intended_name(name, allowed.read)) is not None:
            raise _misspelt(path, prefix + intended)
        if not allowed.is_open:
            _add(path, ignored)


def _add(path: str, ignored: dict[str, None]) -> None:
    ignored[path] = None
    if len(ignored) > MAX_IGNORED:
        raise invalid(f"expected at most {MAX_IGNORED} unknown parameters in a request body; leave some out", "body")


def _collect_nested(value: Any, allowed: FieldNames | None, prefix: str, ignored: dict[str, None]) -> None:
    if allowed is None:
        return
    for item in value if isinstance(value, list) else (value,):
        if isinstance(item, Mapping):
            _collect(item, allowed, prefix, ignored)


def _misspelt(path: str, intended: str) -> ApiError:
    message = f"expected a known parameter, got {shortened(path)}; use {intended}, or leave it out"
    return invalid(message, path[:100], "unknown_parameter")


def _intended_name(name: str, read: Iterable[str]) -> str | None:
    """Return a known name that is one edit away, if any."""
    if len(name) < MIN_CHECKED_CHARS or name in ALL_FOREIGN:
        return None
    return min((known for known in read if is_one_edit(name, known)), default=None)


def is_one_edit(a: str, b: str) -> bool:
    """Return whether one insertion, deletion, replacement or swap of adjacent letters turns `a` into `b`."""
    if abs(len(a) - len(b)) > 1:
        return False
    start, length = 0, min(len(a), len(b))
    while start < length and a[start] == b[start]:
        start += 1
    end = 0
    while end < length - start and a[-1 - end] == b[-1 - end]:
        end += 1
    a_rest, b_rest = a[start : len(a) - end], b[start : len(b) - end]
    return max(len(a_rest), len(b_rest)) == 1 or (len(a_rest) == 2 and a_rest == b_rest[::-1])


def ignored_headers(ignored: tuple[str, ...]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the response header that lists these names, up to MAX_HEADER_CHARS."""
    if not ignored:
        return ()
    listed, num_chars = list[str](), 0
    for name in ignored:
        text = printable_name(name)
        num_chars += len(text) + 2
        if num_chars > MAX_HEADER_CHARS:
            break
        listed.append(text)
    more = [f"more={len(ignored) - len(listed)}"] * (len(listed) < len(ignored))
    return ((HEADER, ", ".join([*listed, *more]).encode("ascii")),)
