"""A named tuple with other fields."""

from typing import Any, TypeVar

Row = TypeVar("Row", bound=tuple[Any, ...])


def changed(row: Row, **fields: Any) -> Row:
    """Steps, items and results are named tuples, whose own method for this has a private name."""
    other: Row = row._replace(**fields)  # type: ignore[attr-defined]
    return other
