"""What `quire top` shows, in figures: gathered from one snapshot after the other, bounded, without a terminal."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.watch.watched_state import MAX_ROWS, SeenCounts, SeenRates, SeenSnapshot, SeenStep

VERSION = 1
"""Of what `--json` prints."""
HOUR_ROWS = 360
MAX_STEPS = 512
NOW_S = 5.0
"""What is called now: steps that ended within so long."""
SETTLED_S = 2.0
"""Until that much was seen of the steps, the history says how fast it goes."""
FRESH_S = 60.0
"""Older figures of the history are not called the latest."""
STATES = SeenCounts.__struct_fields__


@dataclass
class TopFigures:
    """One server so far."""

    server: str
    seen: SeenSnapshot | None = None
    steps: deque[SeenStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    history: deque[SeenRates] = field(default_factory=lambda: deque(maxlen=HOUR_ROWS))
    _since_s: float = 0.0
    """When watching began, by the server's clock."""

    def take(self, snapshot: SeenSnapshot) -> None:
        """Hear one more."""
        if self.seen is None or self.seen.model != snapshot.model or snapshot.at_s < self.seen.at_s:
            self.forget()  # another model, or another life of the server: what was seen says nothing of it
            self._since_s = snapshot.at_s
        self.seen = snapshot
        self.steps.extend(snapshot.steps)
        last_s = self.history[-1].at_s if self.history else float("-inf")
        self.history.extend(row for row in snapshot.history if row.at_s > last_s)

    def forget(self) -> None:
        """Begin anew, as after a restart of the server."""
        self.seen = None
        self.steps.clear()
        self.history.clear()

    @property
    def output_tokens_per_s(self) -> float | None:
        """Of answers, now; None: nothing is known yet."""
        return self._rate("output_tokens")

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Of prompts that are computed, now."""
        return self._rate("prompt_tokens")

    @property
    def ttft_p50_s(self) -> float | None:
        """The middle one of the latest first tokens."""
        return self._latest("ttft_p50_s")

    @property
    def hit_rate(self) -> float | None:
        """The share of the latest prompts' tokens that was found in the cache."""
        return self._latest("hit_rate")

    def _rate(self, what: str) -> float | None:
        if self.seen is None:
            return None
        watched_s = self.seen.at_s - self._since_s
        if watched_s < SETTLED_S or self.seen.fleet is not None:  # gateways have no steps of their own
            return self._latest(f"{what}_per_s")
        span_s = min(NOW_S, watched_s)
        begin_s = self.seen.at_s - span_s
        return sum(int(getattr(step, what)) for step in self.steps if step.at_s > begin_s) / span_s

    def _latest(self, what: str) -> float | None:
        now_s = 0.0 if self.seen is None else self.seen.at_s
        for row in reversed(self.history):
            if now_s - row.at_s > FRESH_S:
                return None
            value: float | None = getattr(row, what)
            if value is not None:
                return value
        return None


def essentials(figures: TopFigures) -> dict[str, Any]:
    """What `quire top --once --json` prints; the guide lists the fields, which stay."""
    seen = figures.seen
    if seen is None:
        return {"v": VERSION, "server": figures.server, "model": None}
    pool = None
    if seen.pool is not None and seen.pool.is_shown:
        counts = msgspec.structs.asdict(seen.pool.counts)
        pool = {"num_blocks": seen.pool.num_blocks, "block_size": seen.pool.block_size, **counts}
    told: dict[str, Any] = {
        "v": VERSION,
        "server": figures.server,
        "model": seen.model,
        "models": seen.models[:MAX_ROWS],
        "output_tokens_per_s": figures.output_tokens_per_s,
        "prompt_tokens_per_s": figures.prompt_tokens_per_s,
        "ttft_p50_s": figures.ttft_p50_s,
        "hit_rate": figures.hit_rate,
        "engine": seen.engine,
        "pool": pool,
        "num_running": len(seen.running),
        "num_waiting": sum(one.num_requests for one in seen.queue),
        "running": seen.running[:MAX_ROWS],
        "queue": seen.queue[:MAX_ROWS],
        "misses": seen.misses[:MAX_ROWS],
        "totals": seen.totals,
        "workers": seen.workers[:MAX_ROWS],
        "warnings": seen.warnings[:MAX_ROWS],
        "fleet": seen.fleet,
    }
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
    return built


def plain_line(figures: TopFigures) -> str:
    """One line for a pipe or a log."""
    seen = figures.seen
    if seen is None:
        return "nothing is known yet"
    parts = [
        seen.model,
        f"{number(figures.output_tokens_per_s)} tokens/s",
        f"{number(figures.prompt_tokens_per_s)} prompt tokens/s",
        f"first token {duration(figures.ttft_p50_s)}",
        f"hit rate {percent(figures.hit_rate)}",
        f"{len(seen.running)} running",
        f"{sum(one.num_requests for one in seen.queue)} waiting",
    ]
    if seen.pool is not None and seen.pool.is_shown:
        held = seen.pool.num_blocks - seen.pool.counts.free - seen.pool.counts.cached
        parts.append(f"pool {percent(held / seen.pool.num_blocks)} in use")
    return ", ".join(parts)


def number(value: float | None) -> str:
    """A count or a rate as a person reads it."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def duration(value: float | None) -> str:
    """A time as a person reads it."""
    if value is None:
        return "-"
    return f"{1000 * value:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def percent(share: float | None) -> str:
    """A share as a person reads it: something is never read as nothing."""
    if share is None:
        return "-"
    rounded = f"{100 * share:.0f}%"
    return "<1%" if rounded == "0%" and share > 0 else rounded
