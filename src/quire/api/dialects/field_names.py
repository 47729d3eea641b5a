"""Field names in bodies: each is read, refused, or ignored and reported in a response header. Pure.

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
from quire.api.http.errors import ApiError, invalid, shortened, shown_name

LEAST_CHARS = 5
"""Shorter names are not checked for misspelling: too many words are one edit away."""
MAX_IGNORED = 512
"""Maximum number of unknown names in one body. All tables here together have half as many."""
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
    """Objects whose `type` is not listed here are ignored whole, for example tools that the server does not run. Empty:
    all types are read."""
    is_open: bool = False
    """Other fields are passed on, for example to a chat template, and not reported as ignored."""


def names(words: str, **nested: FieldNames) -> FieldNames:
    """Return the field names in a space-separated string, and those with nested names."""
    return FieldNames(frozenset((*words.split(), *nested)), nested)


def ignored_names(body: Mapping[str, Any], allowed: FieldNames) -> tuple[str, ...]:
    """Return the names in a body that no dialect reads, nested ones with dots. Raises ApiError for a misspelt name."""
    found: dict[str, None] = {}
    _collect(body, allowed, "", found)
    return tuple(found)


def _collect(body: Mapping[str, Any], allowed: FieldNames, where: str, found: dict[str, None]) -> None:
    if allowed.types and (kind := body.get("type")) not in allowed.types:
        if not allowed.is_open:
            _add(f"{where}type={shortened(kind)}", found)
        return
    for name, value in body.items():
        if name in allowed.read:
            _collect_nested(value, allowed.nested.get(name), f"{where}{name}.", found)
            continue
        path = where + name
        if path in found:
            continue
        if (meant := _meant(name, allowed.read)) is not None:
            raise _misspelt(path, where + meant)
        if not allowed.is_open:
            _add(path, found)


def _add(path: str, found: dict[str, None]) -> None:
    found[path] = None
    if len(found) > MAX_IGNORED:
        raise invalid(f"expected at most {MAX_IGNORED} unknown parameters in a request body; leave some out", "body")


def _collect_nested(value: Any, allowed: FieldNames | None, where: str, found: dict[str, None]) -> None:
    if allowed is None:
        return
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, Mapping):
            _collect(one, allowed, where, found)


def _misspelt(path: str, meant: str) -> ApiError:
    message = f"expected a known parameter, got {shortened(path)}; use {meant}, or leave it out"
    return invalid(message, path[:100], "unknown_parameter")


def _meant(name: str, read: Iterable[str]) -> str | None:
    """Return a known name that is one edit away, if any."""
    if len(name) < LEAST_CHARS or name in ALL_FOREIGN:
        return None
    return min((one for one in read if is_one_edit(name, one)), default=None)


def is_one_edit(one: str, other: str) -> bool:
    """Whether one insertion, deletion, replacement or swap of adjacent letters turns one name into the other."""
    if abs(len(one) - len(other)) > 1:
        return False
    start, most = 0, min(len(one), len(other))
    while start < most and one[start] == other[start]:
        start += 1
    end = 0
    while end < most - start and one[-1 - end] == other[-1 - end]:
        end += 1
    ours, theirs = one[start : len(one) - end], other[start : len(other) - end]
    return max(len(ours), len(theirs)) == 1 or (len(ours) == 2 and ours == theirs[::-1])


def ignored_headers(ignored: tuple[str, ...]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the response header that lists these names, up to MAX_HEADER_CHARS."""
    if not ignored:
        return ()
    shown, num_chars = list[str](), 0
    for name in ignored:
        plain = shown_name(name)
        num_chars += len(plain) + 2
        if num_chars > MAX_HEADER_CHARS:
            break
        shown.append(plain)
    more = [f"more={len(ignored) - len(shown)}"] * (len(shown) < len(ignored))
    return ((HEADER, ", ".join([*shown, *more]).encode("ascii")),)
