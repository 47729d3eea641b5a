"""Finding 13: on a fresh editable install the mutation runs test the installed source, not the mutant.

The build backend's editable install puts a finder before every path, `PYTHONPATH` included. The environment here has
such a finder; everything else is borrowed from the one that runs the test.
"""

import sys
import venv
from pathlib import Path

import pytest

from tests.mutants import kill, memory

HOOK = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "quire":
            places = [{folder!r}]
            return importlib.util.spec_from_file_location(name, {file!r}, submodule_search_locations=places)

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def fresh_install(tmp_path: Path) -> str:
    """The interpreter of an environment whose quire is found by a hook."""
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "quire_hook.py").write_text(HOOK.format(folder=str(kill.SOURCE), file=str(kill.SOURCE / "__init__.py")))
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "quire_hook.pth").write_text("\n".join(["import quire_hook", *borrowed]) + "\n")
    return str(tmp_path / "venv" / "bin" / "python")


def test_a_mutant_is_killed_on_a_fresh_editable_install(fresh_install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fresh_install)
    try:
        alive = kill.survivors([memory.MUTANTS[0]], ("tests/unit/core/memory/test_block_pool.py",))
    except RuntimeError as error:
        pytest.fail(str(error))
    assert alive == []
