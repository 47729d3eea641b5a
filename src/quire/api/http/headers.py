"""Headers of a request, read once and in one way: of a name that stands twice the first counts."""

from collections.abc import Iterable, Mapping

Headers = Mapping[str, str]
"""By name, in lower case as the protocol passes them."""


def first_headers(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """All of them, as text."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found
