"""Align two prompts that share a prefix: find the gaps where they differ and the equal runs between. Pure.

    ours     b b b b X b b b b b b b b
    theirs   b b b b Y Y b b b b b b c
                     └┬┘ └────┬────┘
                     gap     run: tokens that would have been hits if the gap were equal

Short equal runs occur by chance, especially in JSON, so a run has at least `GRAM` tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 32
"""Minimum number of equal tokens in a row after a gap."""
ANCHOR = 16
"""Length and stride of the indexed n-grams of the other prompt; every run of `GRAM` tokens contains a whole one."""
NEAR, FAR = 192, 4096
"""Search windows for the next equal run, in tokens after a difference: the near one first, then the far one."""
MAX_GAPS = 64
MAX_FAR = 4
"""Maximum number of far searches per pair of prompts."""
WIDTH = 4
"""Bytes per packed token."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A difference: tokens `start` to `stop` of our prompt, `other_start` to `other_stop` of the other prompt."""

    start: int
    stop: int
    other_start: int
    other_stop: int
    num_alike: int
    """Equal tokens after the gap, up to the next gap or the end of a prompt."""


def packed(token_ids: Sequence[int]) -> bytes:
    """Pack tokens into bytes, which compare at memory speed."""
    return array("I", token_ids).tobytes()


def num_common(one: bytes, other: bytes, at: int = 0, other_at: int = 0) -> int:
    """Return the length of the common prefix of two packed prompts from these positions, in tokens."""
    limit, low, step = min(len(one) // WIDTH - at, len(other) // WIDTH - other_at), 0, 64
    while low < limit and _is_same(one, at + low, other, other_at + low, min(step, limit - low)):
        low, step = min(limit, low + step), step * 4
    high = min(limit, low + step)
    while low < high:
        middle = (low + high) // 2
        if _is_same(one, at + low, other, other_at + low, middle + 1 - low):
            low = middle + 1
        else:
            high = middle
    return low


def _is_same(one: bytes, at: int, other: bytes, other_at: int, size: int) -> bool:
    return one[at * WIDTH : (at + size) * WIDTH] == other[other_at * WIDTH : (other_at + size) * WIDTH]


def gaps_between(ours: bytes, theirs: bytes, start: int) -> list[Gap]:
    """Return the gaps of two packed prompts that are equal up to token `start`. The last may reach both ends."""
    found, at, other, num_far = list[Gap](), start, start, 0
    while len(found) < MAX_GAPS and at * WIDTH < len(ours) and other * WIDTH < len(theirs):
        place = _place_within(ours, theirs, at, other, NEAR)
        if place is None and num_far < MAX_FAR:
            place, num_far = _place_within(ours, theirs, at, other, FAR), num_far + 1
        stop, other_stop = _ends(ours, theirs) if place is None else place
        run = num_common(ours, theirs, stop, other_stop)
        found.append(Gap(at, stop, other, other_stop, run))
        at, other = stop + run, other_stop + run
    return found


def _ends(ours: bytes, theirs: bytes) -> tuple[int, int]:
    return len(ours) // WIDTH, len(theirs) // WIDTH


def _place_within(ours: bytes, theirs: bytes, at: int, other: int, width: int) -> tuple[int, int] | None:
    size = ANCHOR * WIDTH
    window = theirs[other * WIDTH : (other + width) * WIDTH]
    anchors = dict[bytes, int]()
    for start in range(0, len(window) - size + 1, size):
        anchors.setdefault(window[start : start + size], other + start // WIDTH)
    best: tuple[int, int] | None = None
    best_steps = 2 * width
    for step in range(min(width, len(ours) // WIDTH - at - ANCHOR + 1)):
        if step >= best_steps:
            break
        there = anchors.get(ours[(at + step) * WIDTH : (at + step) * WIDTH + size])
        if there is None:
            continue
        place = _moved_back(ours, theirs, (at + step, there), (at, other))
        steps = place[0] - at + place[1] - other
        if steps < best_steps and num_common(ours, theirs, *place) >= GRAM:
            best, best_steps = place, steps
    return best


def _moved_back(ours: bytes, theirs: bytes, place: tuple[int, int], least: tuple[int, int]) -> tuple[int, int]:
    """Move back to the first equal token of a run, by galloping: strides double while equal and halve otherwise."""
    at, other = place
    most, moved, stride = min(at - least[0], other - least[1]), 0, 1
    while moved < most and stride:
        size = min(stride, most - moved)
        if _is_same(ours, at - moved - size, theirs, other - moved - size, size):
            moved, stride = moved + size, 2 * size
        else:
            stride = size // 2
    return at - moved, other - moved
