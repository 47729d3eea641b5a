"""How many tokens steps compute, counted by size. Metrics show it, and it outlives the worker that made the steps."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The usual buckets of other servers."""


class StepSizes(Counter[int]):
    """Steps by the tokens they computed. No step has more than its budget, so there are few sizes."""

    @property
    def num_tokens(self) -> int:
        return sum(size * count for size, count in self.items())

    def cumulative(self) -> list[tuple[str, int]]:
        """For each bound, and for no bound at the end, how many steps were not larger."""
        counts = [0] * (len(BOUNDS) + 1)
        for size, count in self.items():
            counts[bisect_left(BOUNDS, size)] += count
        return list(zip([*(str(float(bound)) for bound in BOUNDS), "+Inf"], accumulate(counts), strict=True))
