"""Align two prompts that share a prefix: find the gaps where they differ and the equal runs between. Pure.

    ours     b b b b X b b b b b b b b
    theirs   b b b b Y Y b b b b b b c
                     └┬┘ └────┬────┘
                     gap     run: tokens that would have been hits if the gap were equal

Short equal runs occur by chance, especially in JSON, so a run has at least `MIN_RUN` tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MIN_RUN = 32
"""Minimum number of equal tokens in a row after a gap."""
ANCHOR = 16
"""Length and stride of the indexed n-grams of the other prompt; any `MIN_RUN` tokens contain at least one of them."""
NEAR_WINDOW, FAR_WINDOW = 192, 4096
"""Search windows for the next equal run, in tokens after a difference: first the near, then the far window."""
MAX_GAPS = 64
MAX_FAR_SEARCHES = 4
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


def num_common(a: bytes, b: bytes, a_start: int = 0, b_start: int = 0) -> int:
    """Return the length of the common prefix of two packed prompts from these positions, in tokens."""
    limit, low, step = min(len(a) // WIDTH - a_start, len(b) // WIDTH - b_start), 0, 64
    while low < limit and _is_same(a, a_start + low, b, b_start + low, min(step, limit - low)):
        low, step = min(limit, low + step), step * 4
    high = min(limit, low + step)
    while low < high:
        middle = (low + high) // 2
        if _is_same(a, a_start + low, b, b_start + low, middle + 1 - low):
            low = middle + 1
        else:
            high = middle
    return low


def _is_same(a: bytes, a_start: int, b: bytes, b_start: int, size: int) -> bool:
    return a[a_start * WIDTH : (a_start + size) * WIDTH] == b[b_start * WIDTH : (b_start + size) * WIDTH]


def gaps_between(ours: bytes, theirs: bytes, start: int) -> list[Gap]:
    """Return the gaps of two packed prompts that are equal up to token `start`. The last gap may reach both ends."""
    gaps, ours_start, theirs_start, num_far = list[Gap](), start, start, 0
    while len(gaps) < MAX_GAPS and ours_start * WIDTH < len(ours) and theirs_start * WIDTH < len(theirs):
        run_start = _find_run(ours, theirs, ours_start, theirs_start, NEAR_WINDOW)
        if run_start is None and num_far < MAX_FAR_SEARCHES:
            run_start, num_far = _find_run(ours, theirs, ours_start, theirs_start, FAR_WINDOW), num_far + 1
        stop, theirs_stop = _ends(ours, theirs) if run_start is None else run_start
        num_equal = num_common(ours, theirs, stop, theirs_stop)
        gaps.append(Gap(ours_start, stop, theirs_start, theirs_stop, num_equal))
        ours_start, theirs_start = stop + num_equal, theirs_stop + num_equal
    return gaps


def _ends(ours: bytes, theirs: bytes) -> tuple[int, int]:
    return len(ours) // WIDTH, len(theirs) // WIDTH


def _find_run(ours: bytes, theirs: bytes, ours_start: int, theirs_start: int, width: int) -> tuple[int, int] | None:
    size = ANCHOR * WIDTH
    window = theirs[theirs_start * WIDTH : (theirs_start + width) * WIDTH]
    anchors = dict[bytes, int]()
    for start in range(0, len(window) - size + 1, size):
        anchors.setdefault(window[start : start + size], theirs_start + start // WIDTH)
    best: tuple[int, int] | None = None
    best_steps = 2 * width
    for step in range(min(width, len(ours) // WIDTH - ours_start - ANCHOR + 1)):
        if step >= best_steps:
            break
        theirs_index = anchors.get(ours[(ours_start + step) * WIDTH : (ours_start + step) * WIDTH + size])
        if theirs_index is None:
            continue
        run_start = _move_back(ours, theirs, (ours_start + step, theirs_index), (ours_start, theirs_start))
        steps = run_start[0] - ours_start + run_start[1] - theirs_start
        if steps < best_steps and num_common(ours, theirs, *run_start) >= MIN_RUN:
            best, best_steps = run_start, steps
    return best


def _move_back(ours: bytes, theirs: bytes, match: tuple[int, int], limit: tuple[int, int]) -> tuple[int, int]:
    """Move back to the first equal token of a run by galloping: strides double while tokens are equal, else halve."""
    ours_index, theirs_index = match
    max_steps, num_steps, stride = min(ours_index - limit[0], theirs_index - limit[1]), 0, 1
    while num_steps < max_steps and stride:
        size = min(stride, max_steps - num_steps)
        if _is_same(ours, ours_index - num_steps - size, theirs, theirs_index - num_steps - size, size):
            num_steps, stride = num_steps + size, 2 * size
        else:
            stride = size // 2
    return ours_index - num_steps, theirs_index - num_steps
