"""How many tokens steps compute, counted by size. Metrics show it, and it outlives the worker that made the steps."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The field's own buckets."""


class StepSizes:
    """Steps by the tokens they computed."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.num_tokens = 0

    def take(self, sizes: Iterable[int]) -> None:
        """These steps were made."""
        for size in sizes:
            self._counts[bisect_left(BOUNDS, size)] += 1
            self.num_tokens += size

    def cumulative(self) -> list[tuple[str, int]]:
        """For each bound, and for no bound at the end, how many steps were not larger."""
        return list(zip([*(str(float(bound)) for bound in BOUNDS), "+Inf"], accumulate(self._counts), strict=True))
