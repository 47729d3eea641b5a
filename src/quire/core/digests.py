"""What a block's name is made of. Routing, tiers and events need names without a tree, so they live alone here.

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
    """Everything beside the tokens that changes what KV a block holds, or which tenants may hit it."""

    format_version: int
    model: str
    """Fingerprint of config, weight index and sizes, quantisation, dtype."""
    adapter: str
    kv_layout: str
    block_size: int
    cache_group: str
    """Derived by the server from the tenant. Different groups never share a block."""

    def encode(self) -> bytes:
        """Each field with its length before it, so that no two namespaces encode alike."""
        fields = [str(field).encode() for field in astuple(self)]
        return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


class BlockHasher:
    """Makes digests. The key is a fleet's secret: names agree between replicas, and no client can aim a collision."""

    __slots__ = ("_block_state", "_root_state")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"expected a digest key of {KEY_BYTES} bytes, got {len(key)}; make one with os.urandom")
        # A keyed state copied is cheaper than one built anew for every block.
        self._root_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"quire.root")
        self._block_state = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"quire.block")

    def root(self, namespace: Namespace) -> bytes:
        """The digest that a first block of this namespace stands under."""
        state = self._root_state.copy()
        state.update(namespace.encode())
        return state.digest()

    def child(self, parent_digest: bytes, packed_tokens: bytes) -> bytes:
        """The digest of a full block that follows the one with `parent_digest`."""
        state = self._block_state.copy()
        state.update(parent_digest + packed_tokens)
        return state.digest()
