"""Finds the least candidate such that it and all larger ones that were tried are good enough. Pure.

More is not always better: a larger pool or one more member changes evictions and routing, and may do worse. So
bisection alone could stop on the wrong side of an exception. Candidates just above its result are tried as well, and if
one fails the result moves above it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeastFound:
    """The result of a search. Places are indexes of candidates."""

    place: int | None
    """Index of the least one; None if the largest that was tried is not good enough."""
    tried: tuple[tuple[int, bool], ...]
    """Index and whether it was good enough, in ascending order."""

    @property
    def is_monotone(self) -> bool:
        """Whether no candidate that was tried fails above one that was good enough."""
        was_good = [is_good for _, is_good in self.tried]
        return was_good == sorted(was_good)


def least_from_on(
    num_candidates: int, is_good: Callable[[int], bool], num_above: int, firsts: Sequence[int] = ()
) -> LeastFound:
    """Search candidates in ascending order, with as few tries as bisection needs and `num_above` more.

    `firsts` are indexes tried in turn until one is good enough; the default is the last.
    """
    tried: dict[int, bool] = {}

    def tries(place: int) -> bool:
        if place not in tried:
            tried[place] = is_good(place)
        return tried[place]

    for place in firsts or (num_candidates - 1,):
        if tries(place):
            break
    else:
        return LeastFound(None, tuple(sorted(tried.items())))
    bad, good = max((one for one in tried if not tried[one]), default=-1), place
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if tries(middle) else (middle, good)
    while True:
        answer = max((one for one in tried if not tried[one]), default=-1) + 1
        if answer >= num_candidates:
            return LeastFound(None, tuple(sorted(tried.items())))
        wanted = range(answer, min(answer + 1 + num_above, num_candidates))
        if all(tries(one) for one in wanted):
            return LeastFound(answer, tuple(sorted(tried.items())))
