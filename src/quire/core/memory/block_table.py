"""One sequence's blocks in order. Position p lives in block p // block_size, at offset p % block_size.

    tokens    t0 t1 t2 t3 │ t4 t5 t6 t7 │ t8 t9  .  .
    blocks        17      │      4      │     23            block_size 4
                                          ▲     ▲
                               num_computed     num_reserved

Slots below `num_computed` hold true KV. Slots from there to `num_reserved` are being written by the step in flight, the
last of them perhaps for drafts that turn out wrong; at rest the two are equal. A table is opened, changed and released
by `KVMemory` alone; others read it.
"""

from array import array
from collections.abc import Callable, Sequence
from sys import byteorder
from typing import NamedTuple

from quire.core.memory.state_slots import StateCheckpoint


class Slot(NamedTuple):
    """Where one token's KV lives."""

    block: int
    offset: int


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold this many tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def hit_cap(num_tokens: int, block_size: int) -> int:
    """How many blocks of a prompt may be hits: at least one token must be computed, to have logits to sample from."""
    return (num_tokens - 1) // block_size


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32: the form in which blocks store, compare and hash them."""
    packed = array("I", tokens)
    if byteorder == "big":  # pragma: no cover - no such machine in CI
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The token ids again."""
    tokens = array("I", packed)
    if byteorder == "big":  # pragma: no cover - no such machine in CI
        tokens.byteswap()
    return tuple(tokens)


class BlockTable:
    """The blocks of one sequence, and the names of those whose tokens are known."""

    __slots__ = (
        "block_size",
        "blocks",
        "copy_source",
        "digests",
        "has_queried",
        "in_flight_digests",
        "is_counted",
        "is_naming",
        "is_open",
        "keep",
        "last_kept",
        "num_computed",
        "num_matched",
        "num_reserved",
        "packed_tokens",
        "promised_slot",
        "query_hit_tokens",
        "query_tokens",
        "root",
        "state_slot",
        "table_id",
    )

    def __init__(self, table_id: int, root: int, block_size: int) -> None:
        self.table_id = table_id
        self.root = root
        """The parent of its first block: the namespace's root in the prefix tree."""
        self.block_size = block_size
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_reserved = 0
        self.digests: list[bytes] = []
        """Digests of its leading full blocks. Those beyond `num_computed` are guesses, made anew by each verb."""
        self.packed_tokens = bytearray()
        """The tokens those digests were made from."""
        self.in_flight_digests: list[bytes] = []
        """Of those, the blocks that the step in flight completes."""
        self.is_naming = True
        """False once a block could not be named: what follows an unnamed block has no parent to stand under."""
        self.copy_source: int | None = None
        """The shared block the step in flight copies from: held until the step returns."""
        self.is_counted = True
        """Whether what it finds enters the statistics: not when the same sequence has queried before."""
        self.has_queried = False
        self.query_tokens = 0
        self.query_hit_tokens = 0
        self.is_open = True
        # Of models with recurrent layers (`state_slots`):
        self.state_slot: int | None = None
        """Its running slot: the state after its last computed token. It has one once it has computed or reserved."""
        self.promised_slot: int | None = None
        """Where the step in flight puts the state to be kept, and what for."""
        self.keep = StateCheckpoint.TRANSIENT
        self.last_kept: int | None = None
        """The block whose state it kept last."""
        self.num_matched = 0
        """How many blocks it found at its last query, those behind the last state among them."""

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is writing into this table now."""
        return self.num_reserved > self.num_computed

    def slot(self, position: int) -> Slot:
        """Where the KV of the token at this position is, or will be written."""
        index, offset = divmod(position, self.block_size)
        return Slot(self.blocks[index], offset)

    def parent_of(self, index: int) -> int:
        """What the tree must show as the parent of the block at `index`: the block before it, or the root."""
        return self.blocks[index - 1] if index else self.root

    def extend_digests(
        self, tokens: Sequence[int], num_blocks: int, root: bytes, child: Callable[[bytes, bytes], bytes]
    ) -> None:
        """Name its first `num_blocks` full blocks of the known tokens, from where the digests end so far."""
        digests, width = self.digests, 4 * self.block_size
        packed = pack_tokens(tokens[len(digests) * self.block_size : num_blocks * self.block_size])
        self.packed_tokens += packed
        digest = digests[-1] if digests else root
        for start in range(0, len(packed), width):
            digest = child(digest, packed[start : start + width])
            digests.append(digest)

    def cut_digests(self, num_blocks: int) -> None:
        """Forget the names beyond `num_blocks`: what follows may come back as other tokens."""
        del self.digests[num_blocks:]
        del self.packed_tokens[num_blocks * 4 * self.block_size :]

    def tokens_of(self, index: int) -> bytes:
        """The packed tokens of the full block at `index`."""
        width = 4 * self.block_size
        return bytes(self.packed_tokens[index * width : (index + 1) * width])
