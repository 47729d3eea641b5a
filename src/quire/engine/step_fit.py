"""Fits a step profile to timed steps: the non-negative costs with the least sum of squared relative errors
(non-negative least squares). Pure; with about a dozen unknowns, plain Python loops are fast enough.

The cost as a function of the number of rows is piecewise linear. Each segment has its own non-negative rise, so more
tokens never cost less.

    share of a segment's rise:   0 before the segment, 1 after it, linear within it
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
HELD_OUT = 5
"""Every fifth step is left out of the fit and used to estimate its error."""
LEAST_STEPS = 40


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The load of one step and its measured duration."""

    load: StepLoad
    duration_s: float


def fitted_profile(name: str, steps: Sequence[TimedStep]) -> StepProfile:
    """Return the best-fitting profile. Raises InvariantError if there are fewer than LEAST_STEPS steps."""
    if len(steps) < LEAST_STEPS or min(one.duration_s for one in steps) <= 0.0:
        raise InvariantError(f"expected at least {LEAST_STEPS} steps that took time for a profile, got {len(steps)}")
    points = _points(max(one.load.num_rows for one in steps))
    taught = [one for at, one in enumerate(steps) if at % HELD_OUT]
    profile = _profile(name, points, _nearest([(_parts(one.load, points), one.duration_s) for one in taught]))
    held_out = [abs(profile.duration_s(one.load) / one.duration_s - 1.0) for one in steps[::HELD_OUT]]
    return replace(profile, relative_error=median(held_out))


def _points(most_rows: int) -> list[int]:
    """Return 0, 1, 2, 4, ... up to the first power of two that is at least `most_rows`."""
    points = [0, 1]
    while points[-1] < most_rows:
        points.append(points[-1] * 2)
    return points


def _parts(load: StepLoad, points: Sequence[int]) -> list[float]:
    """Return the coefficients of one step: its quantity of each unknown cost."""
    rises = [min(1.0, max(0.0, (load.num_rows - before) / (after - before))) for before, after in pairwise(points)]
    return [*rises, load.num_answering, load.num_context_tokens, load.num_pairs]


def _nearest(steps: Sequence[tuple[list[float], float]]) -> list[float]:
    """Return the non-negative costs with the least sum of squared relative errors."""
    count = len(steps[0][0])
    scaled = [[part / took_s for part in parts] for parts, took_s in steps]
    products = [[sum(row[one] * row[two] for row in scaled) for two in range(count)] for one in range(count)]
    wanted = [sum(row[one] for row in scaled) for one in range(count)]
    costs = [0.0] * count
    refine_costs(costs, products, wanted, ROUNDS)
    return costs


def _profile(name: str, points: Sequence[int], costs: Sequence[float]) -> StepProfile:
    *rises, answering_s, context_token_s, pair_s = costs
    heights = [sum(rises[:at]) for at in range(len(points))]
    return StepProfile(
        name,
        answering_s=answering_s,
        context_token_s=context_token_s,
        pair_s=pair_s,
        row_points=tuple(zip(points, heights, strict=True)),
    )
