"""Fits a step profile to timed steps: the non-negative costs with the least sum of squared relative errors
(non-negative least squares). With about a dozen unknowns, plain Python loops are fast enough.

The cost as a function of the number of rows is piecewise linear. Each segment has its own non-negative rise, so more
tokens never cost less.

    fraction of a segment's rise:   0 before the segment, 1 after it, linear within it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from quire.core.scheduling.step_size import refine_costs
from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import InvariantError

ROUNDS = 5_000
"""Passes of coordinate descent over all unknowns."""
TEST_EVERY = 5
"""Every fifth step is not used for the fit, but to estimate its error."""
MIN_STEPS = 40


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The load of one step and its measured duration."""

    load: StepLoad
    duration_s: float


def fit_profile(name: str, steps: Sequence[TimedStep]) -> StepProfile:
    """Return the best-fitting profile. Raises InvariantError if there are fewer than MIN_STEPS steps."""
    if len(steps) < MIN_STEPS or min(step.duration_s for step in steps) <= 0.0:
        raise InvariantError(f"expected at least {MIN_STEPS} steps of more than 0 seconds, got {len(steps)} steps")
    points = _points(max(step.load.num_rows for step in steps))
    samples = [(_coefficients(step.load, points), step.duration_s) for i, step in enumerate(steps) if i % TEST_EVERY]
    profile = _profile(name, points, _fit_costs(samples))
    errors = [abs(profile.duration_s(step.load) / step.duration_s - 1.0) for step in steps[::TEST_EVERY]]
    return replace(profile, relative_error=median(errors))


def _points(max_rows: int) -> list[int]:
    """Return 0, 1, 2, 4, ... up to the first power of two that is at least `max_rows`."""
    points = [0, 1]
    while points[-1] < max_rows:
        points.append(points[-1] * 2)
    return points


def _coefficients(load: StepLoad, points: Sequence[int]) -> list[float]:
    """Return the coefficients of one step in the fit: how often it pays each unknown cost."""
    rises = [min(1.0, max(0.0, (load.num_rows - start) / (end - start))) for start, end in pairwise(points)]
    return [*rises, load.num_decoding, load.num_context_tokens, load.num_pairs]


def _fit_costs(steps: Sequence[tuple[list[float], float]]) -> list[float]:
    """Return the non-negative costs with the least sum of squared relative errors."""
    count = len(steps[0][0])
    scaled = [[part / duration_s for part in parts] for parts, duration_s in steps]
    products = [[sum(row[i] * row[j] for row in scaled) for j in range(count)] for i in range(count)]
    targets = [sum(row[i] for row in scaled) for i in range(count)]
    costs = [0.0] * count
    refine_costs(costs, products, targets, ROUNDS)
    return costs


def _profile(name: str, points: Sequence[int], costs: Sequence[float]) -> StepProfile:
    *rises, answering_s, context_token_s, pair_s = costs
    heights = [sum(rises[:count]) for count in range(len(points))]
    return StepProfile(
        name,
        answering_s=answering_s,
        context_token_s=context_token_s,
        pair_s=pair_s,
        row_points=tuple(zip(points, heights, strict=True)),
    )
