"""When requests must have ended, earliest first."""

from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush


class Deadlines:
    """A heap of times. An entry of a request that has ended stays until its time, or until most are such."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_s: float, request_id: str) -> None:
        """This request must have ended by then."""
        heappush(self._heap, (deadline_s, request_id))

    def take_due(self, now_s: float) -> Iterator[tuple[float, str]]:
        """Take out what is due, earliest first."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heappop(self._heap)

    def forget_ended(self, live: Collection[str]) -> None:
        """Drop the entries of requests that are not among these, once they are most."""
        if len(self._heap) > 2 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
