"""When requests come: endless streams of moments, in seconds from the start. Take as many as you need."""

from collections.abc import Iterator
from itertools import count, repeat
from math import log1p
from random import Random


def at_once() -> Iterator[float]:
    """All at the start."""
    return repeat(0.0)


def steady(rate_per_s: float) -> Iterator[float]:
    """One after the other, evenly."""
    return (index / rate_per_s for index in count())


def poisson(random: Random, rate_per_s: float) -> Iterator[float]:
    """Independent arrivals at a mean rate."""
    moment_s = 0.0
    while True:
        moment_s += random.expovariate(rate_per_s)
        yield moment_s


def bursts(random: Random, rate_per_s: float, mean_size: float) -> Iterator[float]:
    """The same mean rate, in bursts that come together."""
    moment_s = 0.0
    while True:
        moment_s += random.expovariate(rate_per_s / mean_size)
        for _ in range(_burst_size(random, mean_size)):
            yield moment_s


def _burst_size(random: Random, mean_size: float) -> int:
    """At least one, geometric: the whole part of an exponential with the rate that gives this mean."""
    return 1 if mean_size <= 1 else 1 + int(random.expovariate(-log1p(-1.0 / mean_size)))


def gamma(random: Random, rate_per_s: float, burstiness: float) -> Iterator[float]:
    """Gaps of a gamma distribution with this shape: 1 is Poisson, less comes in clumps, more is steadier."""
    moment_s = 0.0
    while True:
        moment_s += random.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))
        yield moment_s


def ramp(random: Random, from_per_s: float, to_per_s: float, over_s: float) -> Iterator[float]:
    """Independent arrivals whose rate goes evenly from one to the other, and stays there."""
    highest = max(from_per_s, to_per_s)
    moment_s = 0.0
    while True:
        # Drawn at the highest rate, and kept as often as the rate of the moment is of it.
        moment_s += random.expovariate(highest)
        rate = from_per_s + (to_per_s - from_per_s) * min(1.0, moment_s / over_s)
        if random.random() * highest < rate:
            yield moment_s
