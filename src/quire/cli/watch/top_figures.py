"""The metrics of `quire top`, collected from successive snapshots in bounded memory; independent of the terminal."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.watch.watched_state import MAX_ROWS, SeenRates, SeenSnapshot, SeenStep
from quire.core.inspect.snapshots import CellCounts

VERSION = 1
"""Version of the format of the `--json` output."""
HOUR_ROWS = 360
MAX_STEPS = 512
NOW_S = 5.0
"""Current rates are computed from steps that ended in the last NOW_S seconds."""
SETTLED_S = 2.0
"""Until steps have been watched for this time, current rates come from the server's history."""
FRESH_S = 60.0
"""Maximum age of a value of the history that is shown as current."""
STATES = CellCounts.__struct_fields__


@dataclass
class TopFigures:
    """Metrics of one server since watching began."""

    server: str
    seen: SeenSnapshot | None = None
    steps: deque[SeenStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    history: deque[SeenRates] = field(default_factory=lambda: deque(maxlen=HOUR_ROWS))
    _since_s: float = 0.0
    """Start of watching, by the server's clock."""

    def take(self, snapshot: SeenSnapshot) -> None:
        """Add one snapshot. Starts over if the model changed or the server restarted."""
        if self.seen is None or self.seen.model != snapshot.model or snapshot.at_s < self.seen.at_s:
            self.forget()  # another model, or the server restarted
            self._since_s = snapshot.at_s
        self.seen = snapshot
        self.steps.extend(snapshot.steps)
        last_s = self.history[-1].at_s if self.history else float("-inf")
        self.history.extend(row for row in snapshot.history if row.at_s > last_s)

    def forget(self) -> None:
        """Clear all metrics."""
        self.seen = None
        self.steps.clear()
        self.history.clear()

    @property
    def output_tokens_per_s(self) -> float | None:
        """Current rate of output tokens; None: no data yet."""
        return self._rate("output_tokens")

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self._rate("prompt_tokens")

    @property
    def ttft_p50_s(self) -> float | None:
        return self._latest("ttft_p50_s")

    @property
    def hit_rate(self) -> float | None:
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
    """Build the output of `quire top --once --json`. Its fields are stable; the guide lists them."""
    seen = figures.seen
    if seen is None:
        return {"v": VERSION, "server": figures.server, "model": None}
    pool = None
    if (shown := seen.shown_pool) is not None:
        counts = msgspec.structs.asdict(shown.counts)
        pool = {"num_blocks": shown.num_blocks, "block_size": shown.block_size, **counts}
    content: dict[str, Any] = {
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
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(content))
    return built


def plain_line(figures: TopFigures) -> str:
    """Format the metrics as one line for a pipe or a log."""
    seen = figures.seen
    if seen is None:
        return "no data yet"
    parts = [
        seen.model,
        f"{number(figures.output_tokens_per_s)} tokens/s",
        f"{number(figures.prompt_tokens_per_s)} prompt tokens/s",
        f"first token {duration(figures.ttft_p50_s)}",
        f"hit rate {percent(figures.hit_rate)}",
        f"{len(seen.running)} running",
        f"{sum(one.num_requests for one in seen.queue)} waiting",
    ]
    if (pool := seen.shown_pool) is not None:
        held = pool.num_blocks - pool.counts.free - pool.counts.cached
        parts.append(f"pool {percent(held / pool.num_blocks)} in use")
    return ", ".join(parts)


def number(value: float | None) -> str:
    """Format a count or a rate."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def duration(value: float | None) -> str:
    """Format a duration in seconds."""
    if value is None:
        return "-"
    return f"{1000 * value:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def percent(share: float | None) -> str:
    """Format a share as a percentage; a share above 0 is never shown as 0%."""
    if share is None:
        return "-"
    rounded = f"{100 * share:.0f}%"
    return "<1%" if rounded == "0%" and share > 0 else rounded
