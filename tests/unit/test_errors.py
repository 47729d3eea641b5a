"""The drawn tree is the real tree, and every type of error has a code of its own."""

import inspect
import pickle
import re
from importlib import import_module
from pathlib import Path

import pytest

import quire
from quire import errors
from quire.errors import ConfigError, InvalidParameterError, InvariantError, QuireError

SOURCE = Path(quire.__file__).parent
SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def types_of_errors() -> list[type[QuireError]]:
    """All of the tree, wherever they are written."""
    for path in SOURCE.rglob("*.py"):
        if re.search(r"^class \w+Error\((\w+, )*\w+Error\b", path.read_text(), re.MULTILINE):
            import_module(".".join(("quire", *path.relative_to(SOURCE).with_suffix("").parts)))
    found = [QuireError]
    for one in found:
        found += one.__subclasses__()
    return [one for one in found if one.__module__.startswith("quire.")]


def test_the_tree_drawn_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn: list[tuple[str, str, str]] = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^(    [ │├└─]*)([A-Z]\w+Error) +(\w+)", line)
        if found:
            depth = len(found[1]) // 4 - 1
            path[depth:] = [found[2]]
            drawn.append((found[2], path[depth - 1] if depth else "Exception", found[3]))
    real = [
        (name, kind.__bases__[0].__name__, kind.code)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, QuireError)
    ]
    assert sorted(drawn) == sorted(real)


def test_every_type_has_a_code_of_its_own_in_snake_case() -> None:
    kinds = types_of_errors()
    assert {"WorkBudgetError", "ConformanceError"} <= {kind.__name__ for kind in kinds}
    codes = [vars(kind).get("code") for kind in kinds]
    assert None not in codes, f"without a code of its own: {kinds[codes.index(None)]}"
    assert len(set(codes)) == len(codes)
    assert [code for code in codes if not SNAKE_CASE.fullmatch(str(code))] == []


def test_finer_codes_are_in_snake_case_and_none_is_that_of_a_type() -> None:
    finer = {
        code for path in SOURCE.rglob("*.py") for code in re.findall(r'Error\([^\n]*\bcode="([^"]*)"', path.read_text())
    }
    assert [code for code in finer if not SNAKE_CASE.fullmatch(code)] == []
    assert finer.isdisjoint(kind.code for kind in types_of_errors())


@pytest.mark.parametrize(
    "error",
    [
        InvariantError("broken"),
        InvariantError("broken", code="block_not_held"),
        ConfigError("wrong", ("port",), code="port_in_use"),
        InvalidParameterError("wrong", "top_p", code="not_a_number"),
    ],
)
def test_an_error_has_its_code_and_fields_in_another_process(error: QuireError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), copy.code, vars(copy)) == (type(error), str(error), error.code, vars(error))
