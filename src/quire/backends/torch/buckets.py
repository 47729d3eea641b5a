"""For how many rows weights are packed, and how a batch is cut into them. Pure: whoever plans memory asks here, too."""

from bisect import bisect_left
from functools import lru_cache

BUCKET_CHOICES = (
    (4, 8, 16, 32, 64, 128, 256),
    (4, 8, 16, 32, 64, 128),
    (8, 16, 32, 64, 128),
    (8, 16, 32, 128),
    (8, 32, 128),
    (16, 128),
)
"""Best first; each bucket is a copy of the weights."""
WEIGHT_SHARE = 0.5
"""Packed weights may take this share of the memory budget."""
WORTH_CUTTING = 128
"""From so many rows on a product's time is arithmetic: two calls for fewer rows beat one that is filled up."""


def choose_buckets(weight_bytes: int, budget_bytes: int, max_rows: int) -> tuple[int, ...]:
    """The best that fit, without those that no step of so many rows would use; none if not even the fewest fit."""
    num_copies = int(budget_bytes * WEIGHT_SHARE // max(1, weight_bytes))
    for buckets in BUCKET_CHOICES:
        used = tuple(bucket for bucket in buckets if bucket <= max(cut(buckets, max_rows)))
        if len(used) <= num_copies:
            return used
    return ()


@lru_cache(maxsize=4096)
def cut(buckets: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """The row counts of the calls that compute this many rows, largest first; only the last is filled up."""
    whole, rest = divmod(num_rows, buckets[-1])
    if whole:
        return (buckets[-1],) * whole + (cut(buckets, rest) if rest else ())
    at = bisect_left(buckets, rest)
    if at and buckets[at - 1] >= WORTH_CUTTING:
        several = (buckets[at - 1], *cut(buckets, rest - buckets[at - 1]))
        if sum(several) < buckets[at]:
            return several
    return (buckets[at],)
