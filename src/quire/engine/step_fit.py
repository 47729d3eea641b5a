"""From steps that were timed to a profile: costs of at least zero that come nearest, by the square of the relative
difference. Pure; a dozen unknowns, so that plain loops do.

What a step costs by its tokens is a curve of short straight parts, each with a rise of its own that cannot be negative:
more tokens never cost less.

    rise between two points:   0 before the first, 1 behind the second, straight between
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from quire.engine.step_profile import StepLoad, StepProfile
from quire.errors import InvariantError

ROUNDS = 5_000
"""Of going through all unknowns in turn; each round brings the sum of squares down."""
HELD_OUT = 5
"""Every so manyth step is not fitted to: by these the error is told."""
LEAST_STEPS = 40


@dataclass(frozen=True, slots=True)
class TimedStep:
    """What a step had to do, and how long it took."""

    load: StepLoad
    duration_s: float


def fitted_profile(name: str, steps: Sequence[TimedStep]) -> StepProfile:
    """The profile that is nearest to these steps."""
    if len(steps) < LEAST_STEPS or min(one.duration_s for one in steps) <= 0.0:
        raise InvariantError(f"expected at least {LEAST_STEPS} steps that took time for a profile, got {len(steps)}")
    points = _points(max(one.load.num_rows for one in steps))
    taught = [one for at, one in enumerate(steps) if at % HELD_OUT]
    profile = _profile(name, points, _nearest([(_parts(one.load, points), one.duration_s) for one in taught]))
    held_out = [abs(profile.duration_s(one.load) / one.duration_s - 1.0) for one in steps[::HELD_OUT]]
    return replace(profile, relative_error=median(held_out))


def _points(most_rows: int) -> list[int]:
    """1, 2, 4, ... up to the first that is not less."""
    points = [0, 1]
    while points[-1] < most_rows:
        points.append(points[-1] * 2)
    return points


def _parts(load: StepLoad, points: Sequence[int]) -> list[float]:
    """How much of each unknown this step has."""
    rises = [min(1.0, max(0.0, (load.num_rows - before) / (after - before))) for before, after in pairwise(points)]
    return [*rises, load.num_answering, load.num_context_tokens, load.num_pairs]


def _nearest(steps: Sequence[tuple[list[float], float]]) -> list[float]:
    """Costs of at least zero with the least sum of squared relative differences: one unknown after the other is set to
    its best value while the others stay."""
    count = len(steps[0][0])
    scaled = [[part / took_s for part in parts] for parts, took_s in steps]
    products = [[sum(row[one] * row[two] for row in scaled) for two in range(count)] for one in range(count)]
    wanted = [sum(row[one] for row in scaled) for one in range(count)]
    costs = [0.0] * count
    for _ in range(ROUNDS):
        for one in range(count):
            if products[one][one] > 0.0:
                others = sum(products[one][two] * costs[two] for two in range(count)) - products[one][one] * costs[one]
                costs[one] = max(0.0, (wanted[one] - others) / products[one][one])
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
