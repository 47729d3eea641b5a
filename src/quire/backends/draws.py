"""The one random number behind a sampled token. No generator, no state: a name goes in, a number comes out.

Every backend draws here, on the host, so that a seed means the same on all of them, inside any batch, after a
preemption, and in the process that takes over from one that died.
"""

from hashlib import blake2b

_FRACTION_BITS = 53


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """A number in [0, 1), the same for ever for this seed, continuation and position."""
    name = b"%d %d %d" % (seed, sequence_index, position)
    digest = blake2b(name, digest_size=8, person=b"quire-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - _FRACTION_BITS)) / float(1 << _FRACTION_BITS)
