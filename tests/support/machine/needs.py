"""What a test file needs, read from its imports and from those of everything it imports: nothing is run.

So no test has to say by hand that it needs torch or opens sockets, and none can forget to.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import quire

HERE = Path(__file__).parents[3]
ROOTS = {
    "quire": Path(quire.__file__).parent,
    **{name: HERE / name for name in ("tests", "benchmarks", "proofs")},
}
"""The packages that are read; every other import is a need."""


def needs(path: Path) -> frozenset[str]:
    """Modules from elsewhere that are imported when this file is, as they are written: `torch`, `http.client`."""
    seen: set[str] = set()
    found: set[str] = set()
    todo = [_name_of(path)]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in _imports(name):
            (todo.append if imported.partition(".")[0] in ROOTS else found.add)(imported)
    return frozenset(found)


def missing(path: Path) -> list[str]:
    """The packages among its needs that are not installed here."""
    packages = {name.partition(".")[0] for name in needs(path)} - set(sys.stdlib_module_names)
    return sorted(package for package in packages if not _is_installed(package))


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _name_of(path: Path) -> str:
    parts = path.resolve().relative_to(HERE).with_suffix("").parts
    return ".".join(parts)


def _parents(name: str) -> Iterator[str]:
    """The packages that an import of ours runs on its way."""
    parts = name.split(".")
    if parts[0] in ROOTS:
        yield from (".".join(parts[:end]) for end in range(1, len(parts)))


@cache
def _imports(name: str) -> frozenset[str]:
    """What this module imports at its top; nothing if there is no such file, as for a name within a module."""
    root, _, rest = name.partition(".")
    path = ROOTS[root].joinpath(*rest.split(".")) if rest else ROOTS[root]
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset()
    found = set(_imported(ast.parse(file.read_text(encoding="utf-8")).body))
    return frozenset(found | {parent for one in found for parent in _parents(one)})


def _imported(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Imports of statements that always run: not those of functions, nor for the type checker alone."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                if module.partition(".")[0] in ROOTS:
                    yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=test) if ast.unparse(test) != "TYPE_CHECKING":
                yield from _imported([*node.body, *node.orelse])
            case ast.With():
                yield from _imported(node.body)
