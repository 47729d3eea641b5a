"""The least candidate from which on all larger ones that were tried are good enough. Pure.

More is not always better: a larger pool may keep what a smaller one had dropped just in time, and one more member may
send two conversations where one was. So bisection alone could stop on the wrong side of an exception. Those just above
its answer are tried as well, and where one fails the answer moves behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeastFound:
    """What a search came to. Places are those of the candidates."""

    place: int | None
    """Of the least one; None if the largest that was tried is not good enough."""
    tried: tuple[tuple[int, bool], ...]
    """Place and whether it was good enough, in order of place."""

    @property
    def is_monotone(self) -> bool:
        """Whether no candidate that was tried fails above one that was good enough."""
        was_good = [is_good for _, is_good in self.tried]
        return was_good == sorted(was_good)


def least_from_on(
    num_candidates: int, is_good: Callable[[int], bool], num_above: int, firsts: Sequence[int] = ()
) -> LeastFound:
    """Look for it among candidates in ascending order, with as few tries as bisection needs and `num_above` more.

    `firsts` are places that are tried one after the other until one is good enough; without them, the last is.
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
