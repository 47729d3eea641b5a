"""Nothing above the backends knows one by its name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BACKENDS = frozenset({"cpu", "mlx", "torch"})
PACKAGES = (*BACKENDS, *(f"quire.backends.{name}" for name in BACKENDS), "mlx_lm", "transformers")


@pytest.mark.parametrize("room", ["core", "engine", "api"])
def test_nothing_above_the_backends_compares_with_a_name_of_one_or_imports_one(room: str) -> None:
    paths = sorted((ROOT / "src" / "quire" / room).rglob("*.py"))
    assert paths
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in backend_branches(path.read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        'is_here = backend == "cpu"',
        'found = known["mlx"]',
        'match backend:\n    case "torch":\n        pass',
        "import mlx_lm",
        "from quire.backends.cpu import runner",
    ],
)
def test_such_places_are_found(text: str) -> None:
    assert backend_branches(text)


def backend_branches(text: str) -> list[int]:
    """Lines with a comparison or a pattern that has a backend's name, or with an import of one."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        named: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            named = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            named = [node.value]
        elif isinstance(node, ast.Subscript):
            named = [node.slice]
        constants = [one for part in named for one in ast.walk(part) if isinstance(one, ast.Constant)]
        if any(one.value in BACKENDS for one in constants if isinstance(one.value, str)) or _imports_one(node):
            lines.append(getattr(node, "lineno", 0))
    return lines


def _imports_one(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or "")
    return any(name == one or name.startswith(f"{one}.") for name in names for one in PACKAGES)
