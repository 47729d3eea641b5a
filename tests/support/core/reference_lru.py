"""What a prefix cache would be with a dictionary of token tuples and exact leaf LRU: slow, obvious, and right.

Written without a look at the pool: prefixes are tuples, recency is a number, and the victim is the least recently used
prefix that no longer prefix extends and no running sequence holds.
"""

from collections import Counter
from heapq import heappop, heappush

Prefix = tuple[int, ...]


class ReferenceCache:
    """At most `num_blocks` blocks, those that running sequences hold included."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.last_used: dict[Prefix, int] = {}
        self.num_children: Counter[Prefix] = Counter()
        self.num_holders: Counter[Prefix] = Counter()
        self._num_partial = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Prefix]] = []

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        size = self.block_size
        return [tokens[: index * size] for index in range(1, len(tokens) // size + 1)]

    def lookup(self, tokens: Prefix) -> int:
        """How many tokens of this prompt are cached; at least one is left to compute."""
        cap = (len(tokens) - 1) // self.block_size
        num_hits = 0
        for prefix in self.prefixes(tokens)[:cap]:
            if prefix not in self.last_used:
                break
            num_hits += 1
        return num_hits * self.block_size

    def run(self, tokens: Prefix) -> None:
        """Compute the prompt and hold its blocks; make room first, never at the cost of its own prefix."""
        chain = self.prefixes(tokens)
        hits = chain[: self.lookup(tokens) // self.block_size]
        self.num_holders.update(hits)
        # A block that is cached but above the cap is computed again and then found to be there already.
        num_needed = -(-len(tokens) // self.block_size) - len(hits)
        while len(self.last_used) + self._num_partial + num_needed > self.num_blocks:
            self._evict()
        for prefix in chain[len(hits) :]:
            if prefix not in self.last_used:
                self.last_used[prefix] = self._clock
                self.num_children[prefix[: -self.block_size]] += 1
            self.num_holders[prefix] += 1
        self._num_partial += len(tokens) % self.block_size > 0

    def release(self, tokens: Prefix) -> None:
        """The sequence is done: its prefixes are now the most recently used."""
        self._clock += 1
        self._num_partial -= len(tokens) % self.block_size > 0
        for prefix in self.prefixes(tokens):
            self.num_holders[prefix] -= 1
            self.last_used[prefix] = self._clock
            heappush(self._leaves, (self._clock, -len(prefix), prefix))

    def _evict(self) -> None:
        deferred = []
        while True:
            used, length, prefix = heappop(self._leaves)
            if self.last_used.get(prefix) != used or self.num_holders[prefix]:
                continue
            if not self.num_children[prefix]:
                break
            deferred.append((used, length, prefix))
        for entry in deferred:
            heappush(self._leaves, entry)
        del self.last_used[prefix]
        self.num_children[prefix[: -self.block_size]] -= 1
