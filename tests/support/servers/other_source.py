"""How a process comes to import quire from another folder than the installed one, whatever kind the install is.

A plain or path-based install is outdone by `PYTHONPATH`. An editable install may put a finder of its own before every
path; so the folder also gets a `sitecustomize`, which every interpreter runs after the install's hooks: it takes away
whoever else would find quire. Processes that such a process starts inherit all of it.
"""

import os
from pathlib import Path

_SITECUSTOMIZE = '''"""Quire is found by path alone."""

import sys
from importlib.machinery import PathFinder


def _finds_quire(finder):
    find_spec = getattr(finder, "find_spec", None)
    return find_spec is not None and find_spec("quire", None) is not None


sys.meta_path[:] = [one for one in sys.meta_path if one is PathFinder or not _finds_quire(one)]
'''


def importing_from(folder: Path) -> dict[str, str]:
    """The environment of a process that is to import the `quire` in this folder, which is prepared for it."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
