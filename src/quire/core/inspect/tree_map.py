"""The prefix tree drawn small: runs of blocks without a fork become one node, and of the nodes the most used are shown.

The links are copied at one moment, and walked at leisure: a piece is two thousand blocks, about a millisecond.
Nodes stand in flat arrays, so a tree of a million of them is no million objects.
"""

from array import array
from collections.abc import Iterator
from heapq import heappush, heapreplace

from quire.core.inspect.snapshots import MAX_NODES, TreeNode, TreePicture
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.prefix_tree import PrefixTree

PIECE_BLOCKS = 2048


class TreeDrawing:
    """One drawing, piece by piece: iterate until it ends, then take it. It shows the moment at which it was begun."""

    def __init__(self, tree: PrefixTree, pool: BlockPool, max_nodes: int = MAX_NODES) -> None:
        _, self.first_children, self._older, roots = tree.copied(bare=True)
        self.root_nodes = [(space.cache_group, first_child) for space, first_child in roots]
        self._ref_count = pool.ref_count[:]
        self._block_size = tree.block_size
        self._max_nodes = max_nodes
        self._first = array("i")
        self.parents = array("i")
        self._root = array("i")
        self._length = array("i")
        self._below = array("i")
        self._best: list[tuple[int, int, int]] = []
        """A heap: references, blocks below, and the negative place of a node."""

    def pieces(self) -> Iterator[None]:
        """Draws one piece after the other."""
        num_walked = 0
        for at in range(len(self.root_nodes)):
            for length in self._walk(at):
                num_walked += length
                if num_walked >= PIECE_BLOCKS:
                    num_walked = 0
                    yield
        self._below = self._length[:]
        for at in range(len(self._first) - 1, -1, -1):
            self._judge(at)
            if at % PIECE_BLOCKS == 0:
                yield

    def _walk(self, root: int) -> Iterator[int]:
        """Every node under this root, parents first: how many blocks each has."""
        first_child, older = self.first_children, self._older
        to_visit = [(self.root_nodes[root][1], -1)]
        while to_visit:
            block, parent = to_visit.pop()
            if not block:
                continue
            to_visit.append((older[block], parent))
            end, length = block, 1
            while (child := first_child[end]) and not older[child]:
                end, length = child, length + 1
            if child:
                to_visit.append((child, len(self._first)))
            self._first.append(block)
            self.parents.append(parent)
            self._root.append(root)
            self._length.append(length)
            yield length

    def _judge(self, at: int) -> None:
        """All below it have been judged. Its parent has at least its references, and more blocks below: a node
        among the best has all its parents there."""
        below, parent = self._below[at], self.parents[at]
        if parent >= 0:
            self._below[parent] += below
        worth = (self._ref_count[self._first[at]], below, -at)
        if len(self._best) < self._max_nodes:
            heappush(self._best, worth)
        elif worth > self._best[0]:
            heapreplace(self._best, worth)

    def drawn(self) -> TreePicture:
        """The nodes to show, parents first."""
        places: dict[int, int] = {-1: -1}
        nodes: list[TreeNode] = []
        for at in sorted(-worth[2] for worth in self._best):
            parent = places[self.parents[at]]
            places[at] = len(nodes)
            nodes.append(
                TreeNode(
                    self._first[at],
                    parent,
                    self._length[at] * self._block_size,
                    self._ref_count[self._first[at]],
                    0 if parent < 0 else nodes[parent].depth + 1,
                    self.root_nodes[self._root[at]][0],
                    self._below[at] * self._block_size,
                )
            )
        return TreePicture(tuple(nodes), len(self._first), sum(self._length) * self._block_size, is_drawn=True)
