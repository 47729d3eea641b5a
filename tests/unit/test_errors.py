"""The drawn tree is the real tree."""

import inspect
import re

from quire import errors


def test_the_tree_drawn_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn: list[tuple[str, str]] = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^(    [ │├└─]*)([A-Z]\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4 - 1
            path[depth:] = [found[2]]
            drawn.append((found[2], path[depth - 1] if depth else "Exception"))
    real = [
        (name, kind.__bases__[0].__name__)
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    assert sorted(drawn) == sorted(real)
