"""Digests (keyed hashes), which identify KV blocks by content. Routing and KV events use them without the tree.

root   = BLAKE2b-256(key, namespace, each field with its length before it)
digest = BLAKE2b-256(key, parent digest ‖ tokens as little-endian u32)
"""

from dataclasses import astuple, dataclass
from hashlib import blake2b

from quire.errors import ConfigError

DIGEST_BYTES = 32
KEY_BYTES = 32
HASH_MASK = (1 << 63) - 1
"""Keeps 63 bits, because some subscribers of KV events decode hashes as signed 64-bit integers."""


def block_hash(digest: bytes) -> int:
    """Return the hash of a block for KV events and routers, from its digest."""
    return int.from_bytes(digest[-8:], "big") & HASH_MASK


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything except tokens that determines a block's KV data, or which tenants may reuse the block."""

    format_version: int
    model: str
    """Fingerprint of the model's config, weight index and sizes, quantization and dtype."""
    adapter: str
    kv_layout: str
    block_size: int
    cache_group: str
    """Name of a group of tenants that share cached blocks. Blocks are never shared between groups."""

    def encode(self) -> bytes:
        """Encode each field with a length prefix, so that no two namespaces have the same encoding."""
        fields = [str(field).encode() for field in astuple(self)]
        return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


class BlockHasher:
    """Computes digests with the fleet's secret key: replicas compute equal digests, clients cannot forge collisions."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"expected a digest key of {KEY_BYTES} bytes, got {len(key)}; make one with os.urandom")
        # Copying a keyed hash state is cheaper than creating one for every block.
        self._root_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"quire.root")
        self._block_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"quire.block")

    def root(self, namespace: Namespace) -> bytes:
        """Return the root digest of a namespace: the parent digest of its first blocks."""
        state = self._root_state.copy()
        state.update(namespace.encode())
        return state.digest()

    def child(self, parent_digest: bytes, packed_tokens: bytes) -> bytes:
        """Return the digest of a full block whose predecessor has `parent_digest`."""
        state = self._block_state.copy()
        state.update(parent_digest + packed_tokens)
        return state.digest()
