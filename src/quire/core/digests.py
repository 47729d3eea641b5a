"""Digests, which identify KV blocks by content. Separate from the tree, because routing, offload and events need them.

root   = BLAKE2b-256(key, namespace, each field with its length before it)
digest = BLAKE2b-256(key, parent digest ‖ tokens as little-endian u32)
"""

from dataclasses import astuple, dataclass
from hashlib import blake2b

from quire.errors import ConfigError

DIGEST_BYTES = 32
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything beside the tokens that determines a block's KV data, or which tenants may reuse it."""

    format_version: int
    model: str
    """Fingerprint of the config, weight index and sizes, quantization and dtype."""
    adapter: str
    kv_layout: str
    block_size: int
    cache_group: str
    """The tenants that share cached blocks; the server derives it from the tenant. Groups never share a block."""

    def encode(self) -> bytes:
        """Encode each field with a length prefix, so that no two namespaces have the same encoding."""
        fields = [str(field).encode() for field in astuple(self)]
        return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


class BlockHasher:
    """Computes digests with a secret key of the fleet: replicas agree on them, and clients cannot forge collisions."""

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
