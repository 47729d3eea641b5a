"""How tightly tests hold to what may change: sentences of errors, private members, dotted paths. Read, never run."""

import ast
from collections.abc import Iterator

Place = tuple[int, str]
"""A line, and what stands there."""
OWNERS = frozenset({"self", "cls"})


def prose_matches(tree: ast.AST) -> Iterator[Place]:
    """Where a test compares an error's sentence: `match=` of a text, or `in str(error)`."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="match", value=ast.Constant(value=str()) | ast.JoinedStr()):
                yield node.value.lineno, ast.unparse(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Call(func=ast.Name(id="str"))]):
                yield node.lineno, ast.unparse(node)


def private_uses(tree: ast.AST) -> Iterator[Place]:
    """Private members of another module's objects, and private names imported."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if is_private(name) and not is_own(owner):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, one.name) for one in names if is_private(one.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in OWNERS


def dotted_patches(tree: ast.AST) -> Iterator[Place]:
    """What is replaced by a dotted path in a text, which no tool renames."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "patch"), args=[ast.Constant(value=str(path)), *_]):
                if "." in path:
                    yield node.lineno, path
