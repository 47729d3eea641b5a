"""Nothing that reads data may run it: the calls that made other servers remotely executable appear nowhere."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = {
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle",
    "multiprocessing",  # pickles what it passes
}  # fmt: skip
NAMES = {"eval", "exec", "__import__"}
"""Built-in functions that run text, however they are reached."""
CALLS = {
    "torch.load", "torch.serialization.load", "numpy.load", "pandas.read_pickle",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    *(f"builtins.{name}" for name in NAMES),
}  # fmt: skip
METHODS = {"recv_pyobj", "send_pyobj", "read_pickle"}


def breaches(source: str) -> list[str]:
    """What of it could execute what it reads. Names are followed through the file's own imports."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {one.asname: one.name for one in names if one.asname}
                found += [one.name for one in names if _is_banned(one.name)]
            case ast.ImportFrom(module=str(module), names=names):
                imported |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
                found += [module] if _is_banned(module) else []
                found += [f"{module}.{one.name}" for one in names if f"{module}.{one.name}" in CALLS]
            case ast.Constant(value=str(text)) if text in MODULES:
                found.append(text)  # import_module("pickle")
    return found + [name for node in ast.walk(tree) if (name := _breach(node, imported))]


def _is_banned(module: str) -> bool:
    return module.partition(".")[0] in MODULES


def _breach(node: ast.AST, imported: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name) if name in NAMES:
            return name
        case ast.Call(func=ast.Name(id="compile")):
            return "compile"
        case ast.Attribute(attr=name) if name in METHODS:
            return name
        case ast.Attribute():
            path = _path(node, imported)
            return path if path in CALLS else None
    return None


def _path(node: ast.expr, imported: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return imported.get(name, name)
        case ast.Attribute(value=value, attr=name):
            return f"{_path(value, imported)}.{name}"
    return ""


def test_no_file_of_quire_unpickles_or_evaluates() -> None:
    files = [path for folder in ("src", "benchmarks", "proofs") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert {str(path): found for path in files if (found := breaches(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from cloudpickle.x import y",
        "import marshal, os",
        "eval('1')",
        "exec(text)",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "import yaml\nload = yaml.load",
        "import yaml\nyaml.load_all(x)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import torch as t\nt.load(path)",
        "import torch.serialization\ntorch.serialization.load(path)",
        "f = eval",
        "import builtins\nbuiltins.exec(x)",
        "import_module('pickle')",
        "socket.recv_pyobj()",
        "from multiprocessing import Queue",
        "import shelve",
    ],
)
def test_the_gate_sees(source: str) -> None:
    assert breaches(source)


@pytest.mark.parametrize("source", ["model.eval()", "json.load(file)", "msgspec.json.decode(x)", "re.compile('x')"])
def test_the_gate_lets_pass(source: str) -> None:
    assert not breaches(source)
