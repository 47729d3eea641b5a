"""Token ids as a trace has them: each under another name, the same one wherever it stands.

A keyed permutation of the vocabulary: ids sorted by a keyed hash of each. Who has no key cannot tell which token has
which name, other than by how often and beside which others it comes; plans depend on equal and unequal alone. An id
beyond the vocabulary, which no model has, keeps its own.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol


class TraceTokenNames(Protocol):
    """From token ids to what a trace has in their place."""

    def __call__(self, token_ids: Iterable[int]) -> list[int]:
        """The names of these, in their order."""


def own_names(token_ids: Iterable[int]) -> list[int]:
    """Tokens under the ids they have."""
    return list(token_ids)


class PermutedNames:
    """Each id of a vocabulary under another of its ids."""

    __slots__ = ("_names",)

    def __init__(self, vocabulary_size: int, key: bytes) -> None:
        keyed = blake2b(key=key, digest_size=16, person=b"quire.trace")

        def mixed(token_id: int) -> bytes:
            state = keyed.copy()
            state.update(token_id.to_bytes(4, "little"))
            return state.digest()

        self._names = array("I", sorted(range(vocabulary_size), key=mixed))

    def __call__(self, token_ids: Iterable[int]) -> list[int]:
        names, size = self._names, len(self._names)
        return [names[token_id] if token_id < size else token_id for token_id in token_ids]
