"""Nothing that reads data may run it: the calls that made other servers remotely executable appear nowhere."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("numpy", "load")}
ALIASES = {"np": "numpy"}


def breaches(source: str) -> list[str]:
    """What of it could execute what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [one.name for one in names if one.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module.partition(".")[0] in MODULES else []
                found += [f"{module}.{one.name}" for one in names if (module, one.name) in METHODS]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (ALIASES.get(owner, owner), name) in METHODS:
                found.append(f"{owner}.{name}")
    return found


def test_no_file_of_quire_unpickles_or_evaluates() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
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
        "load = yaml.load",
        "np.load(path, allow_pickle=True)",
        "import shelve",
    ],
)
def test_the_gate_sees(source: str) -> None:
    assert breaches(source)


@pytest.mark.parametrize("source", ["model.eval()", "json.load(file)", "msgspec.json.decode(x)", "re.compile('x')"])
def test_the_gate_lets_pass(source: str) -> None:
    assert not breaches(source)
