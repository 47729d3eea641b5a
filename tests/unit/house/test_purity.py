"""The core stands on the standard library, and on msgspec for its events, alone."""

import ast
import subprocess
import sys
from pathlib import Path

import msgspec

import quire.core

CORE = Path(quire.core.__file__).parent

IMPORT_WITH_ALL_ELSE_BLOCKED = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ("quire", "msgspec") and top not in sys.stdlib_module_names:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
sys.path[:0] = sys.argv[1:]
import quire.core
for module in pkgutil.walk_packages(quire.core.__path__, "quire.core."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_the_core_imports_with_every_other_third_party_package_blocked() -> None:
    paths = [str(CORE.parents[1]), str(Path(msgspec.__path__[0]).parent)]
    command = [sys.executable, "-I", "-S", "-c", IMPORT_WITH_ALL_ELSE_BLOCKED, *paths]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == {
        "quire.core." + ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
        for path in CORE.rglob("*.py")
        if path.parent != CORE or path.stem != "__init__"
    }


def test_the_core_never_reads_a_clock_or_throws_dice_or_asserts() -> None:
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path.name}: -O strips assertions; raise InvariantError"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
                assert not {"time", "random", "uuid", "asyncio", "secrets"} & set(modules), path.name
