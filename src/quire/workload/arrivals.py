"""Arrival processes: endless iterators of times in seconds from the start; callers take as many as needed."""

from collections.abc import Iterator
from itertools import count, repeat
from math import log1p
from random import Random


def at_once() -> Iterator[float]:
    """Yield time 0 for all requests."""
    return repeat(0.0)


def steady(rate_per_s: float) -> Iterator[float]:
    """Yield evenly spaced times."""
    return (index / rate_per_s for index in count())


def poisson(random: Random, rate_per_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    arrival_s = 0.0
    while True:
        arrival_s += random.expovariate(rate_per_s)
        yield arrival_s


def bursts(random: Random, rate_per_s: float, mean_size: float) -> Iterator[float]:
    """Yield bursts of simultaneous arrivals, as a Poisson process of bursts; the mean request rate is `rate_per_s`."""
    arrival_s = 0.0
    while True:
        arrival_s += random.expovariate(rate_per_s / mean_size)
        for _ in range(_burst_size(random, mean_size)):
            yield arrival_s


def _burst_size(random: Random, mean_size: float) -> int:
    """Return a geometrically distributed size of at least 1: 1 + the floor of an exponential with the matching rate."""
    return 1 if mean_size <= 1 else 1 + int(random.expovariate(-log1p(-1.0 / mean_size)))


def gamma(random: Random, rate_per_s: float, burstiness: float) -> Iterator[float]:
    """Yield times with gamma-distributed gaps. `burstiness` is the shape: 1 is Poisson, lower is burstier."""
    arrival_s = 0.0
    while True:
        arrival_s += random.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))
        yield arrival_s


def ramp(random: Random, from_per_s: float, to_per_s: float, over_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes linearly for `over_s`, and is then constant."""
    highest_per_s = max(from_per_s, to_per_s)
    arrival_s = 0.0
    while True:
        # Thinning: draw arrivals at the highest rate, and keep each with probability rate / highest.
        arrival_s += random.expovariate(highest_per_s)
        rate_per_s = from_per_s + (to_per_s - from_per_s) * min(1.0, arrival_s / over_s)
        if random.random() * highest_per_s < rate_per_s:
            yield arrival_s
