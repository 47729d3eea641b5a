"""The block table of one sequence. Position p is stored in the table's block p // block_size, at offset p % block_size.

    tokens    t0 t1 t2 t3 │ t4 t5 t6 t7 │ t8 t9  .  .
    blocks        17      │      4      │     23            block_size 4
                                          ▲     ▲
                               num_computed     num_reserved

Token slots below `num_computed` contain valid KV. Slots from there to `num_reserved` are being written by the step in
flight; the last of these may be for draft tokens that will be rejected. Between steps, the two numbers are equal.
Only `KVMemory` opens, changes and releases tables; other modules read them.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import byteorder

from quire.core.memory.state_slots import StateCheckpoint


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks needed for this many tokens; the last block may be partly filled."""
    return -(-num_tokens // block_size)


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt may be hits. At least one token must be computed, to get logits."""
    return (num_tokens - 1) // block_size


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32, the format in which they are stored, compared and hashed."""
    packed = array("I", tokens)
    if byteorder == "big":  # pragma: no cover - no such machine in CI
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Unpack token ids that `pack_tokens` packed."""
    tokens = array("I", packed)
    if byteorder == "big":  # pragma: no cover - no such machine in CI
        tokens.byteswap()
    return tuple(tokens)


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one sequence (or pin), and the digests of those that are full of known tokens."""

    table_id: int
    root: int
    """The parent of the first block: the namespace's root in the prefix tree."""
    block_size: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_reserved: int = 0
    digests: list[bytes] = field(default_factory=list)
    """Digests of the leading full blocks. Those beyond `num_computed` are provisional and recomputed when needed."""
    packed_tokens: bytearray = field(default_factory=bytearray)
    """The tokens covered by `digests`."""
    in_flight_digests: list[bytes] = field(default_factory=list)
    """Digests of the blocks that the step in flight completes."""
    is_naming: bool = True
    """False once a full block could not be named: later blocks then have no named parent and cannot be named either."""
    copy_source: int | None = None
    """The shared block that the step in flight copies from; referenced until the step returns."""
    is_counted: bool = True
    """Whether cache hits count in the statistics; False if the sequence was counted before, with an earlier table."""
    has_queried: bool = False
    query_tokens: int = 0  # looked up, not yet counted in the statistics
    query_hit_tokens: int = 0  # likewise, those found
    is_open: bool = True
    # For models with recurrent layers (`state_slots`):
    state_slot: int | None = None
    """Slot of the recurrent state after the last computed token; None before the first `match` or `reserve`."""
    reserved_slot: int | None = None
    """The slot into which the state is copied after the step in flight, to be cached for the reason `keep`."""
    keep: StateCheckpoint = StateCheckpoint.TRANSIENT
    last_cached_block: int | None = None
    """The block whose state this table cached last."""
    num_matched: int = 0
    """Number of leading blocks that matched at the last lookup, including blocks after the last cached state."""

    @property
    def is_in_flight(self) -> bool:
        """Whether the step in flight writes into this table."""
        return self.num_reserved > self.num_computed

    def parent_of(self, index: int) -> int:
        """Return the expected parent of the block at `index`: the block before it, or the root."""
        return self.blocks[index - 1] if index else self.root

    def extend_digests(
        self, tokens: Sequence[int], num_blocks: int, root: bytes, child: Callable[[bytes, bytes], bytes]
    ) -> None:
        """Extend `digests` to the first `num_blocks` full blocks of `tokens`; `child` computes one digest."""
        digests, width = self.digests, 4 * self.block_size
        packed = pack_tokens(tokens[len(digests) * self.block_size : num_blocks * self.block_size])
        self.packed_tokens += packed
        digest = digests[-1] if digests else root
        for start in range(0, len(packed), width):
            digest = child(digest, packed[start : start + width])
            digests.append(digest)

    def cut_digests(self, num_blocks: int) -> None:
        """Drop the digests beyond the first `num_blocks`, because later tokens may change."""
        del self.digests[num_blocks:]
        del self.packed_tokens[num_blocks * 4 * self.block_size :]

    def tokens_of(self, index: int) -> bytes:
        """Return the packed tokens of the full block at `index`."""
        width = 4 * self.block_size
        return bytes(self.packed_tokens[index * width : (index + 1) * width])
