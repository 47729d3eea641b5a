"""When asks come: endless streams of moments, in seconds from the start. Take as many as you need."""

from collections.abc import Iterator
from itertools import count, repeat
from random import Random


def at_once() -> Iterator[float]:
    """Everyone at the start."""
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
        for _ in range(1 + int(random.expovariate(1.0 / mean_size))):
            yield moment_s
