"""Counts how tests depend on details that may change: error texts, private members, dotted paths of patches."""

import ast
from collections.abc import Iterator

Place = tuple[int, str]
"""A line number, and the code there."""
OWNERS = frozenset({"self", "cls"})


def prose_matches(tree: ast.AST) -> Iterator[Place]:
    """Yield comparisons with the text of an error: `match="..."` or `in str(error)`."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="match", value=ast.Constant(value=str()) | ast.JoinedStr()):
                yield node.value.lineno, ast.unparse(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Call(func=ast.Name(id="str"))]):
                yield node.lineno, ast.unparse(node)


def private_uses(tree: ast.AST) -> Iterator[Place]:
    """Yield uses of private members of other objects, and imports of private names."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if is_private(name) and not is_own(owner):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.name) for alias in names if is_private(alias.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in OWNERS


def dotted_patches(tree: ast.AST) -> Iterator[Place]:
    """Yield patches by a dotted path in a string, which refactoring tools do not rename."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "patch"), args=[ast.Constant(value=str(path)), *_]):
                if "." in path:
                    yield node.lineno, path
