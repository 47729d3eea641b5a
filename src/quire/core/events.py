"""What happened, as plain frozen messages. The core emits them; observers and publishers read them.

The KV events carry everything the field's wire format asks for (block hashes in chain order, the parent, the
tokens, the block size, and the adapter and cache group that entered the hash). A block's `BlockStored` always
comes before those of its children and before its own `BlockRemoved`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of full blocks became hittable, each under the one before it."""

    digests: tuple[bytes, ...]
    parent_digest: bytes | None
    """The block before the first of this run; None when the run begins a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str
    cache_group: str
    """Must be announced: else a router counts one tenant's blocks as hits for another."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be hit. Leaves come before their parents."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
