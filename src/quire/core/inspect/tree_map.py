"""A summary of the prefix tree for the dashboard: its nodes are runs of blocks without a fork; the most used are shown.

The links of the tree are copied at once and walked later in pieces of 2048 blocks, about a millisecond each.
Nodes are stored in flat arrays, so that a million nodes are not a million objects.
"""

from array import array
from collections.abc import Iterator
from heapq import heappush, heapreplace

from quire.core.inspect.snapshots import MAX_NODES, TreeNode, TreePicture
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.prefix_tree import PrefixTree

PIECE_BLOCKS = 2048


class TreeDrawing:
    """Builds one summary in pieces: exhaust `pieces()`, then call `result()`. It shows the tree as of construction."""

    def __init__(self, tree: PrefixTree, pool: BlockPool, max_nodes: int = MAX_NODES) -> None:
        _, self.first_children, self._older, roots = tree.copy(bare=True)
        self.root_nodes = [(space.cache_group, first_child) for space, first_child in roots]
        self._ref_count = pool.ref_count[:]
        self._block_size = tree.block_size
        self._max_nodes = max_nodes
        # By node: its first block, its parent node, its root, its own blocks, all blocks of its subtree.
        self._first = array("i")
        self.parents = array("i")
        self._root = array("i")
        self._length, self._below = array("i"), array("i")
        self._best: list[tuple[int, int, int]] = []
        """A heap of the best nodes: references, blocks in the subtree, negated node index."""

    def pieces(self) -> Iterator[None]:
        """Build the summary, one piece per iteration."""
        num_walked = 0
        for index in range(len(self.root_nodes)):
            for length in self._walk(index):
                num_walked += length
                if num_walked >= PIECE_BLOCKS:
                    num_walked = 0
                    yield
        self._below = self._length[:]
        for index in range(len(self._first) - 1, -1, -1):
            self._rank(index)
            if index % PIECE_BLOCKS == 0:
                yield

    def _walk(self, root: int) -> Iterator[int]:
        """Collect the nodes under this root, parents first; yield the number of blocks of each."""
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

    def _rank(self, node: int) -> None:
        """Rank a node after all its descendants. A parent has at least as many references as its child and more blocks
        in its subtree, so it ranks higher: ancestors of a selected node are selected, too."""
        num_below, parent = self._below[node], self.parents[node]
        if parent >= 0:
            self._below[parent] += num_below
        rank = (self._ref_count[self._first[node]], num_below, -node)
        if len(self._best) < self._max_nodes:
            heappush(self._best, rank)
        elif rank > self._best[0]:
            heapreplace(self._best, rank)

    def result(self) -> TreePicture:
        """Return the selected nodes, parents first."""
        index_of: dict[int, int] = {-1: -1}
        nodes: list[TreeNode] = []
        for node in sorted(-rank[2] for rank in self._best):
            parent = index_of[self.parents[node]]
            index_of[node] = len(nodes)
            nodes.append(
                TreeNode(
                    self._first[node],
                    parent,
                    self._length[node] * self._block_size,
                    self._ref_count[self._first[node]],
                    0 if parent < 0 else nodes[parent].depth + 1,
                    self.root_nodes[self._root[node]][0],
                    self._below[node] * self._block_size,
                )
            )
        return TreePicture(tuple(nodes), len(self._first), sum(self._length) * self._block_size, is_drawn=True)
