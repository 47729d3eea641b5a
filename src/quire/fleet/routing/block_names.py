"""A router's names of blocks. It makes them itself, from token ids, so members need share neither a key nor a
hash function nor a block size, and OpenAI members fit in.

root   = first 63 bits of BLAKE2b(model, adapter, cache group, each with its length before it)
name   = first 63 bits of BLAKE2b(parent's name ‖ tokens of the block as little-endian u32)

The parent of a first block is the root. Blocks of 16 and of 32 tokens form two chains that never meet. A name follows
from its parent's name and the block's own tokens, so a block with a known parent is named in one step.
Names are short enough for two blocks to share one, about once in a million full indexes; that costs a prefill too.
"""

from collections.abc import Sequence
from hashlib import blake2b

from quire.core.memory.block_table import pack_tokens

NAME_BYTES = 8
_BLOCK_STATE = blake2b(digest_size=NAME_BYTES, person=b"quire.fleet")
"""Copied for every block, which is cheaper than a new one; never changed."""


def root_name(model: str, adapter: str, cache_group: str, key: bytes = b"") -> int:
    """The parent of first blocks: everything beside tokens that decides which requests may share a block.

    With a key of its own, no client can aim at a name: names stay inside the gateway.
    """
    fields = [field.encode() for field in (model, adapter, cache_group)]
    prefixed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    digest = blake2b(prefixed, digest_size=NAME_BYTES, key=key, person=b"quire.fleet.root").digest()
    return int.from_bytes(digest, "big") >> 1


def names_of(parent: int, tokens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Names of the full blocks of these tokens, the first of which follows `parent`: a root, or the block before.

    A partial last block has no name. A prompt may hit fewer than these: `hit_cap` of the core.
    """
    width = 4 * block_size
    packed = pack_tokens(tokens[: len(tokens) // block_size * block_size])
    begin, read = _BLOCK_STATE.copy, int.from_bytes
    name, names = parent, list[int]()
    for start in range(0, len(packed), width):
        state = begin()
        state.update(name.to_bytes(NAME_BYTES, "big") + packed[start : start + width])
        name = read(state.digest(), "big") >> 1
        names.append(name)
    return tuple(names)
