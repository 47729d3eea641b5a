"""Block names: the router's own chained hashes of block contents. The router computes them from token ids, so members
need not share a key, hash function or block size, and may be OpenAI servers.

root   = first 63 bits of BLAKE2b(model, adapter, cache group, each length-prefixed)
name   = first 63 bits of BLAKE2b(parent's name ‖ tokens of the block as little-endian u32)

The parent of a first block is the root. A block's name only needs its parent's name and its own tokens. Different block
sizes (such as 16 and 32 tokens) form separate chains. Two blocks collide about once in a million full indexes, which
only costs a prefill.
"""

from collections.abc import Sequence
from hashlib import blake2b

from quire.core.memory.block_table import pack_tokens

NAME_BYTES = 8
_BLOCK_STATE = blake2b(digest_size=NAME_BYTES, person=b"quire.fleet")
"""Initial hash state, copied for every block because that is cheaper than a new one."""


def root_name(model: str, adapter: str, cache_group: str, key: bytes = b"") -> int:
    """Return the parent name of first blocks, which hashes everything except tokens that a shared block depends on.

    With a secret `key`, clients cannot construct collisions. Names never leave the gateway.
    """
    fields = [field.encode() for field in (model, adapter, cache_group)]
    prefixed = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    digest = blake2b(prefixed, digest_size=NAME_BYTES, key=key, person=b"quire.fleet.root").digest()
    return int.from_bytes(digest, "big") >> 1


def names_of(parent: int, tokens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return the names of the full blocks of `tokens`; the first block's parent is `parent`, a root or a block name.

    A partial last block has no name. A prompt may hit fewer blocks than this: see `max_hit_blocks` in the core.
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
