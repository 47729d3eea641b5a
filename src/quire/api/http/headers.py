"""Headers of a request, read in one way everywhere: of a name that stands twice the first counts."""

from collections.abc import Iterable, Mapping

Pairs = Iterable[tuple[bytes, bytes]]


def first_headers(pairs: Pairs) -> Mapping[bytes, bytes]:
    """By name, in small letters as the protocol hands them on."""
    found: dict[bytes, bytes] = {}
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def header_text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    """One of them as text; None if it is not there."""
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
