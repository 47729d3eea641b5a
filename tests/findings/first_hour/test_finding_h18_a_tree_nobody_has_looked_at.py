"""First hour, 18: the dashboard said "Nothing is cached yet." of 34 cached blocks, before their tree was drawn."""

from pathlib import Path

import quire.api
from quire.core.digests import BlockHasher
from quire.core.inspect.snapshots import TreePicture
from quire.core.inspect.tree_map import TreeDrawing
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory

PAGE = Path(quire.api.__path__[0]) / "dashboard" / "tree.js"


def test_a_tree_that_was_looked_at_says_so_even_if_it_is_empty() -> None:
    assert not TreePicture().is_drawn
    memory = KVMemory(KVMemoryConfig(8, 4), BlockHasher(bytes(32)))
    drawing = TreeDrawing(memory.tree, memory.pool)
    list(drawing.pieces())
    assert drawing.result() == TreePicture(is_drawn=True)


def test_the_dashboard_waits_for_the_first_picture() -> None:
    assert 'is_drawn ? "Nothing is cached yet." : "Waiting for the first picture' in PAGE.read_text()
