"""When requests must have ended, earliest first."""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop


class Deadlines(list[tuple[float, str]]):
    """A heap of times and requests. The entry of one that has ended stays until its time, or until most are such."""

    def take_due(self, now_s: float) -> Iterator[tuple[float, str]]:
        """Take out what is due, earliest first."""
        while self and self[0][0] <= now_s:
            yield heappop(self)

    def forget_ended(self, live: Collection[str]) -> None:
        """Drop the entries of requests that are not among these, once they are most."""
        if len(self) > 2 * len(live) + 64:
            self[:] = [entry for entry in self if entry[1] in live]
            heapify(self)
