"""The digests of blocks that a step completes: a sequence that needs one waits for it instead of computing it, too."""

from collections.abc import Iterable


class InFlight(dict[bytes, int]):
    """Digest -> by how many tables it is being computed."""

    __slots__ = ()

    def enter(self, digests: Iterable[bytes]) -> None:
        """A table computes these from now on."""
        for digest in digests:
            self[digest] = self.get(digest, 0) + 1

    def leave(self, digests: Iterable[bytes]) -> None:
        """Its step has returned."""
        for digest in digests:
            count = self.pop(digest) - 1
            if count:
                self[digest] = count
