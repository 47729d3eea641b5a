"""What a setting changes: the same load through the same fleet twice, once with the setting as it is and once with
another value.

Both runs get the same requests at the same moments, so each request is its own pair. Neighbours are not independent:
who waits behind a long prompt waits with everybody behind it. So requests are taken in batches that follow each other,
each batch gives one ratio of means, and batches are judged as `quire bench compare` judges rounds (`quire.verdicts`).
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
"""Requests; fewer are mostly chance."""


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """One value of one setting, beside the value it has."""

    setting: str
    base: str
    other: str
    """Values in words."""
    size: MemberSize | None
    """With the other value; None if it is not tried."""
    reason: str = ""
    """Why it is not tried."""


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """What another value does to latencies and hits."""

    setting: str
    base: str
    other: str
    verdict: SpeedVerdict
    changes: tuple[Change, ...] = ()
    num_batches: int = 0
    hit_rate_base: float | None = None
    hit_rate_other: float | None = None
    reason: str = ""
    """Why there is no verdict."""


def setting_effects(planner: Planner, num_members: int, num_blocks: int) -> Iterator[SettingEffect]:
    """Of every setting that can matter to this load, at one size of the fleet."""
    size = replace(planner.setup.size, num_blocks=num_blocks)
    base: tuple[float, WatchedLatencies] | None = None
    for one in other_settings(size, planner.facts.num_tenants, planner.facts.priorities):
        if one.size is None:
            yield SettingEffect(one.setting, one.base, one.other, SpeedVerdict.NOT_COMPARABLE, reason=one.reason)
            continue
        if base is None:
            base = _run(planner, num_members, size, "settings as they are")
        try:
            other = _run(planner, num_members, one.size, f"{one.setting} {one.other}")
        except ConfigError as error:
            reason = f"a server refuses it: {error}"
            yield SettingEffect(one.setting, one.base, one.other, SpeedVerdict.NOT_COMPARABLE, reason=reason)
            continue
        yield _judged(one, base, other)


def other_settings(size: MemberSize, num_tenants: int, priorities: tuple[str, ...]) -> Iterator[OtherSetting]:
    """Half and twice of what has a size; and what is on or off, where the load has somebody it concerns."""
    for block_size in (size.block_size // 2, size.block_size * 2):
        if block_size:
            num_blocks = num_blocks_for(size.num_blocks * size.block_size, block_size)
            other = replace(size, block_size=block_size, num_blocks=num_blocks)
            yield OtherSetting("block size", _tokens(size.block_size), _tokens(block_size), other)
    for step_tokens in (size.max_step_tokens // 2, size.max_step_tokens * 2):
        other = replace(size, max_step_tokens=step_tokens)
        yield OtherSetting("step budget", _tokens(size.max_step_tokens), _tokens(step_tokens), other)
    high_s, normal_s, low_s = size.head_starts_s
    told = f"{high_s:g}, {normal_s:g}, {low_s:g} s"
    if len(priorities) > 1:
        yield OtherSetting("head starts", told, "none", replace(size, head_starts_s=(0.0, 0.0, 0.0)))
    else:
        yield OtherSetting("head starts", told, "none", None, "all requests have one class; give --classes")
    if num_tenants > 1:
        yield OtherSetting("cache shares", "each tenant its own", "one for all", replace(size, is_cache_shared=True))
    else:
        yield OtherSetting("cache shares", "each tenant its own", "one for all", None, "one tenant; give --tenants")


def batch_means(seconds: Sequence[float], num_batches: int) -> list[float | None]:
    """In milliseconds, of values that follow each other, in batches of one size; None for a batch without any. Those
    that are left over belong to the last."""
    width = len(seconds) // num_batches
    means: list[float | None] = []
    for number in range(num_batches):
        end = None if number == num_batches - 1 else (number + 1) * width
        known = [value for value in seconds[number * width : end] if not isnan(value)]
        means.append(fmean(known) * 1e3 if known else None)
    return means


def _run(planner: Planner, num_members: int, size: MemberSize, what: str) -> tuple[float, WatchedLatencies]:
    report, watched = planner.watched_run(num_members, size, what=what)
    return report.hit_rate, watched


def _judged(
    one: OtherSetting, base: tuple[float, WatchedLatencies], other: tuple[float, WatchedLatencies]
) -> SettingEffect:
    a, b = base[1], other[1]
    num_batches = min(MAX_BATCHES, len(a.ttft_by_arrival_s) // MIN_BATCH)
    judged = SettingEffect(
        one.setting, one.base, one.other, SpeedVerdict.NOT_COMPARABLE, (), num_batches, base[0], other[0]
    )
    if len(a.ttft_s) != len(b.ttft_s):
        return replace(judged, reason=f"{len(a.ttft_s):,} requests were answered, and {len(b.ttft_s):,} with the other")
    if num_batches < MIN_PAIRS:
        least = MIN_PAIRS * MIN_BATCH
        return replace(judged, reason=f"a verdict needs {least} requests, {len(a.ttft_by_arrival_s)} given")
    found = (
        change_of(name, -1, list(zip(batch_means(ours, num_batches), batch_means(theirs, num_batches), strict=True)))
        for name, ours, theirs in (
            ("mean_ttft_ms", a.ttft_by_arrival_s, b.ttft_by_arrival_s),
            ("mean_tpot_ms", a.tpot_by_arrival_s, b.tpot_by_arrival_s),
        )
    )
    changes = tuple(change for change in found if change is not None)
    if not changes:
        return replace(judged, reason="there is no latency in every batch")
    worst = next(kind for kind in SpeedVerdict if any(change.verdict == kind for change in changes))
    return replace(judged, verdict=worst, changes=changes)


def _tokens(number: int) -> str:
    return f"{number:,} tokens"
