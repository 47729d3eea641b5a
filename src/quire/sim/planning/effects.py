"""Effects of settings: runs one load on one fleet with the current value of a setting and with another value.

Both runs receive the same requests at the same times, so the requests form pairs. Consecutive requests are correlated,
because requests after a long prompt wait together. Requests are therefore grouped into batches, each batch gives one
ratio of means, and the batches are compared like the rounds of `quire bench compare` (`quire.verdicts`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import fmean

from quire.core.memory.block_table import num_blocks_for
from quire.errors import ConfigError
from quire.sim.fleet.member import MemberSize
from quire.sim.planning.planning import Planner
from quire.sim.planning.watched_latencies import WatchedLatencies
from quire.verdicts import MIN_PAIRS, Change, SpeedVerdict, change_of

MAX_BATCHES = 20
MIN_BATCH = 10
"""Smallest number of requests per batch; smaller batches are mostly noise."""


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """The effect of one setting's other value on latencies and hit rate, relative to the current value."""

    setting: str
    base: str
    other: str
    """The current and the other value, as text."""
    verdict: SpeedVerdict = SpeedVerdict.NOT_COMPARABLE
    changes: tuple[Change, ...] = ()
    num_batches: int = 0
    hit_rate_base: float | None = None
    hit_rate_other: float | None = None
    reason: str = ""
    """Why there is no verdict."""


def setting_effects(planner: Planner, num_members: int, num_blocks: int) -> Iterator[SettingEffect]:
    """Run and compare every setting that can affect this load, at one fleet size."""
    size = replace(planner.setup.size, num_blocks=num_blocks)
    base: tuple[float, WatchedLatencies] | None = None
    for effect, other_size in other_settings(size, planner.facts.num_tenants, planner.facts.priorities):
        if other_size is None:
            yield effect
            continue
        if base is None:
            base = _run(planner, num_members, size, "current settings")
        try:
            other = _run(planner, num_members, other_size, f"{effect.setting} {effect.other}")
        except ConfigError as error:
            yield replace(effect, reason=f"rejected by a server: {error}")
            continue
        yield _compare(effect, base, other)


def other_settings(
    size: MemberSize, num_tenants: int, priorities: tuple[str, ...]
) -> Iterator[tuple[SettingEffect, MemberSize | None]]:
    """Yield each setting with its other value, and the resulting member size: half and double of numeric settings, and
    the other state of switches. For a switch that cannot affect the load, yield the reason and no size."""
    for block_size in (size.block_size // 2, size.block_size * 2):
        if block_size:
            num_blocks = num_blocks_for(size.num_blocks * size.block_size, block_size)
            other = replace(size, block_size=block_size, num_blocks=num_blocks)
            yield SettingEffect("block size", _tokens(size.block_size), _tokens(block_size)), other
    for step_tokens in (size.max_step_tokens // 2, size.max_step_tokens * 2):
        other = replace(size, max_step_tokens=step_tokens)
        yield SettingEffect("step budget", _tokens(size.max_step_tokens), _tokens(step_tokens)), other
    high_s, normal_s, low_s = size.head_starts_s
    current = f"{high_s:g}, {normal_s:g}, {low_s:g} s"
    head_starts = SettingEffect("head starts", current, "none")
    if len(priorities) > 1:
        yield head_starts, replace(size, head_starts_s=(0.0, 0.0, 0.0))
    else:
        yield replace(head_starts, reason="all requests have one class; give --classes"), None
    cache_shares = SettingEffect("cache shares", "each tenant its own", "one for all")
    if num_tenants > 1:
        yield cache_shares, replace(size, is_cache_shared=True)
    else:
        yield replace(cache_shares, reason="one tenant; give --tenants"), None


def batch_means(seconds: Sequence[float], num_batches: int) -> list[float | None]:
    """Return the means, in milliseconds, of consecutive batches of equal size; None for an empty batch. The last batch
    includes the remainder."""
    batch_size = len(seconds) // num_batches
    means: list[float | None] = []
    for number in range(num_batches):
        end = None if number == num_batches - 1 else (number + 1) * batch_size
        measured = [value for value in seconds[number * batch_size : end] if not isnan(value)]
        means.append(fmean(measured) * 1e3 if measured else None)
    return means


def _run(planner: Planner, num_members: int, size: MemberSize, label: str) -> tuple[float, WatchedLatencies]:
    report, latencies = planner.watched_run(num_members, size, label=label)
    return report.hit_rate, latencies


def _compare(
    effect: SettingEffect, base: tuple[float, WatchedLatencies], other: tuple[float, WatchedLatencies]
) -> SettingEffect:
    a, b = base[1], other[1]
    num_batches = min(MAX_BATCHES, len(a.ttft_by_arrival_s) // MIN_BATCH)
    result = replace(effect, num_batches=num_batches, hit_rate_base=base[0], hit_rate_other=other[0])
    if len(a.ttft_s) != len(b.ttft_s):
        return replace(result, reason=f"{len(a.ttft_s):,} requests finished, {len(b.ttft_s):,} with the other value")
    if num_batches < MIN_PAIRS:
        min_requests = MIN_PAIRS * MIN_BATCH
        return replace(result, reason=f"a verdict needs {min_requests} requests, got {len(a.ttft_by_arrival_s)}")
    candidates = (
        change_of(name, -1, list(zip(batch_means(base_s, num_batches), batch_means(other_s, num_batches), strict=True)))
        for name, base_s, other_s in (
            ("mean_ttft_ms", a.ttft_by_arrival_s, b.ttft_by_arrival_s),
            ("mean_tpot_ms", a.tpot_by_arrival_s, b.tpot_by_arrival_s),
        )
    )
    changes = tuple(change for change in candidates if change is not None)
    if not changes:
        return replace(result, reason="some batches have no latency")
    verdict = next(candidate for candidate in SpeedVerdict if any(change.verdict == candidate for change in changes))
    return replace(result, verdict=verdict, changes=changes)


def _tokens(num_tokens: int) -> str:
    return f"{num_tokens:,} tokens"
