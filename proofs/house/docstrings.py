"""Finds public methods that need a docstring and have none.

Properties and members of protocols have a name and a type; an override has the docstring of its base, or of the
protocol that its class implements without naming it. All other public methods of public classes need one.
"""

import ast
import builtins
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from proofs.house.measures import FUNCTIONS, Module


@dataclass(frozen=True)
class Class:
    """One class at the top of a module, with its bases by their full names."""

    module: str
    node: ast.ClassDef = field(repr=False)
    bases: tuple[str, ...]

    @property
    def is_protocol(self) -> bool:
        return "typing.Protocol" in self.bases

    @property
    def methods(self) -> Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        return {one.name: one for one in self.node.body if isinstance(one, FUNCTIONS)}

    @property
    def members(self) -> set[str]:
        """Methods, and attributes of the class and of its instances."""
        names = {*self.methods}
        for node in ast.walk(self.node):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
        for one in self.node.body:
            match one:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Assign(targets=targets):
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
        return names


def undocumented(modules: Sequence[Module]) -> list[str]:
    """Public methods without a docstring that need one."""
    classes = _classes(modules)
    protocols = {name: _all_members(name, classes) for name, cls in classes.items() if cls.is_protocol}
    names = []
    for name, cls in classes.items():
        if cls.node.name.startswith("_") or cls.is_protocol:
            continue
        missing = [
            method.name for method in cls.methods.values() if _is_plain(method) and not ast.get_docstring(method)
        ]
        if missing:
            documented = _inherited(name, classes) | _implemented(_all_members(name, classes), protocols)
            names += [f"{name}.{method}" for method in missing if method not in documented]
    return names


def _is_plain(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is public, and neither a property nor an overload."""
    decorators = {ast.unparse(one).rpartition(".")[2] for one in method.decorator_list}
    is_exempt = decorators & {"property", "cached_property", "setter", "overload", "override"}
    return not method.name.startswith("_") and not is_exempt


def _classes(modules: Sequence[Module]) -> dict[str, Class]:
    """All classes at the top of a module, by their full names."""
    imported = {module.name: dict(_imported_names(module)) for module in modules}
    nodes = [(module, node) for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)]
    known = {f"{module.name}.{node.name}" for module, node in nodes}

    def full(module: str, base: ast.expr) -> str:
        text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        name = f"{module}.{text}"
        if name not in known:
            first, dot, rest = text.partition(".")
            name = imported[module].get(first, first) + dot + rest
        while name not in known:  # the name was re-exported
            home, _, last = name.rpartition(".")
            if last not in imported.get(home, {}):
                break
            name = imported[home][last]
        return name

    return {
        f"{module.name}.{node.name}": Class(module.name, node, tuple(full(module.name, base) for base in node.bases))
        for module, node in nodes
    }


def _imported_names(module: Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(module=str(origin), names=names):
                yield from ((one.asname or one.name, f"{origin}.{one.name}") for one in names)
            case ast.Import(names=names):
                yield from ((one.asname or one.name.partition(".")[0], one.name) for one in names)


def _ancestors(name: str, classes: Mapping[str, Class]) -> Iterator[str]:
    for base in classes[name].bases if name in classes else ():
        yield base
        yield from _ancestors(base, classes)


def _all_members(name: str, classes: Mapping[str, Class]) -> set[str]:
    related = (name, *_ancestors(name, classes))
    return set[str]().union(*(classes[one].members for one in related if one in classes))


def _inherited(name: str, classes: Mapping[str, Class]) -> set[str]:
    """Return methods of all bases, in the tree or in libraries."""
    names = set[str]()
    for base in _ancestors(name, classes):
        names |= {*classes[base].methods} if base in classes else _library_members(base)
    return names


@cache
def _library_members(name: str) -> frozenset[str]:
    """Return the members of a library's class; none if the library is not installed."""
    home, _, last = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(home) if home else builtins, last, None)
    except ImportError:
        cls = None
    return frozenset(dir(cls)) - frozenset(dir(object)) if cls is not None else frozenset()


def _implemented(members: set[str], protocols: Mapping[str, set[str]]) -> set[str]:
    """Members of protocols that a class with these has all of."""
    return set[str]().union(*(known for known in protocols.values() if known and known <= members))
