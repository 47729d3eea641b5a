"""Plain columns whose lines are never wrapped. Standard library only, so that it imports quickly."""

from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """The rows under their header; the columns numbered in `right` are numbers and end at the right."""
    table = [[plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(header))]
    lines = (
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def plain(text: str) -> str:
    """The text with control characters escaped: names of files and tokens are untrusted."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
