"""Which methods need a docstring, on a small invented tree, and that the real one has them."""

from pathlib import Path

from proofs.house.docstrings import undocumented
from proofs.house.measures import read_tree

ROOT = Path(__file__).parents[3]
SEAM = """
from typing import Protocol

class Shelf(Protocol):
    size: int
    def take(self, name: str) -> str: ...

class Base:
    def sort(self) -> None:
        "In place."
"""
STORE = """
import json
from shop.seam import Base

class Store(Base):
    def __init__(self) -> None:
        self.size = 3
    @property
    def first(self) -> str:
        return "a"
    def take(self, name: str) -> str:
        return name
    def sort(self) -> None:
        pass
    def sweep(self) -> None:
        pass
    def _dust(self) -> None:
        pass

class Label(json.JSONEncoder):
    def default(self, o: object) -> str:
        return ""
    def print(self) -> None:
        pass

class Small:
    def take(self, name: str) -> str:
        return name

class _Hidden:
    def take(self) -> None:
        pass
"""


def test_properties_overrides_and_members_of_protocols_need_no_docstring(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    for name, text in {"__init__": "", "seam": SEAM, "store": STORE}.items():
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    found = undocumented(read_tree(tmp_path / "shop"))
    assert found == ["shop.store.Store.sweep", "shop.store.Label.print", "shop.store.Small.take"]


def test_every_other_public_method_has_one() -> None:
    assert undocumented(read_tree(ROOT / "src" / "quire")) == []
