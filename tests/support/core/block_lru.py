"""A prefix cache of whole blocks with exact least-recently-used leaves: an independent replay of a trace, one prompt at
a time, fast enough for long ones. Written without a look at the pool: a block is the pair of its parent and content."""

from collections import OrderedDict
from collections.abc import Sequence


class BlockLru:
    """At most `num_blocks` blocks; a prompt in work holds its own, the partial last one too."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        """Parent and content -> a block's id; ids are never used again."""
        self._recency: OrderedDict[int, tuple[int, tuple[int, ...]]] = OrderedDict()
        """Cached blocks, the least recently used first. A chain is released last block first, so leaves come first."""
        self._next_id = 1
        self.num_prompt_tokens = self.num_hit_tokens = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def run(self, tokens: Sequence[int]) -> None:
        """Compute a prompt: find what is there, make room for the rest, and leave all full blocks cached."""
        size = self.block_size
        contents = [tuple(tokens[at * size : (at + 1) * size]) for at in range(len(tokens) // size)]
        cap, parent, chain = (len(tokens) - 1) // size, 0, []
        for content in contents[:cap]:
            found = self._ids.get((parent, content))
            if found is None:
                break
            chain.append((found, parent, content))
            parent = found
        self.num_prompt_tokens += len(tokens)
        self.num_hit_tokens += len(chain) * size
        for block, _, _ in chain:
            del self._recency[block]  # in use
        # One more token is computed behind the prompt only if an answer goes on; here none does.
        num_needed = -(-len(tokens) // size) - len(chain)
        while len(self._recency) + len(chain) + num_needed > self.num_blocks:
            self._evict()
        for content in contents[len(chain) :]:
            known = self._ids.get((parent, content))  # above the cap it may be there already: then that one is kept
            if known is not None:
                self._recency.pop(known, None)
                block = known
            else:
                block, self._next_id = self._next_id, self._next_id + 1
                self._ids[parent, content] = block
            chain.append((block, parent, content))
            parent = block
        for block, above, content in reversed(chain):
            self._recency[block] = (above, content)

    def _evict(self) -> None:
        """The least recently used: no cached block stands below it, for those are less recently used still."""
        block, key = self._recency.popitem(last=False)
        if self._ids.pop(key) != block:
            raise ValueError("a block was cached under another's name")
