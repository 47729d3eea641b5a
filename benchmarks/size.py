"""Prints the lines and the longest function of each file, to notice growth early."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "quire"


def longest_function(tree: ast.Module) -> tuple[int, str]:
    """Return lines and name of the longest function in a file."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return max((((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in functions), default=(0, ""))


def main() -> None:
    folders: dict[Path, int] = {}
    print(f"{'lines':>6}  {'longest function':28}  file")
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        lines, (length, name) = text.count("\n"), longest_function(ast.parse(text))
        folders[path.parent] = folders.get(path.parent, 0) + lines
        print(f"{lines:6}  {f'{length:3} {name}':28}  {path.relative_to(ROOT.parent)}")
    for folder, lines in folders.items():
        print(f"{lines:6}  {'in all':28}  {folder.relative_to(ROOT.parent)}/")


if __name__ == "__main__":
    main()
