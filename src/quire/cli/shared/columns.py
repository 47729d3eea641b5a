"""Two kinds of tables: plain columns whose lines are never wrapped, and a framed table. The module imports quickly."""

from collections.abc import Iterable, Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Format the header and the rows as aligned text. Columns whose indices are in `right` are right-aligned."""
    table = [[plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = (
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a framed table, at most as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def plain(text: str) -> str:
    """Escape control characters, because file names and token texts are untrusted."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
