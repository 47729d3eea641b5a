"""The metrics of `quire top`, collected from successive snapshots in bounded memory; independent of the terminal."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.watch.watched_state import MAX_ROWS, WatchedRates, WatchedSnapshot, WatchedStep
from quire.core.inspect.snapshots import CellCounts

VERSION = 1
"""Version of the format of the `--json` output."""
HOUR_ROWS = 360
MAX_STEPS = 512
RATE_WINDOW_S = 5.0
"""Current rates are computed from steps that ended in this time before the snapshot."""
MIN_WATCHED_S = 2.0
"""Until steps have been watched for this time, current rates come from the server's history."""
FRESH_S = 60.0
"""Maximum age of a value of the history that is shown as current."""
STATES = CellCounts.__struct_fields__


@dataclass
class TopMetrics:
    """Metrics of one server since watching began; `snapshot` is the latest snapshot."""

    server: str
    snapshot: WatchedSnapshot | None = None
    steps: deque[WatchedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    history: deque[WatchedRates] = field(default_factory=lambda: deque(maxlen=HOUR_ROWS))
    _since_s: float = 0.0
    """Start of watching, by the server's clock."""

    def add(self, snapshot: WatchedSnapshot) -> None:
        """Add one snapshot. Starts over if the model changed or the server restarted."""
        if self.snapshot is None or self.snapshot.model != snapshot.model or snapshot.at_s < self.snapshot.at_s:
            self.clear()  # another model, or the server restarted
            self._since_s = snapshot.at_s
        self.snapshot = snapshot
        self.steps.extend(snapshot.steps)
        last_s = self.history[-1].at_s if self.history else float("-inf")
        self.history.extend(row for row in snapshot.history if row.at_s > last_s)

    def clear(self) -> None:
        """Clear all metrics."""
        self.snapshot = None
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

    def _rate(self, name: str) -> float | None:
        if self.snapshot is None:
            return None
        watched_s = self.snapshot.at_s - self._since_s
        if watched_s < MIN_WATCHED_S or self.snapshot.fleet is not None:  # gateways have no steps of their own
            return self._latest(f"{name}_per_s")
        span_s = min(RATE_WINDOW_S, watched_s)
        begin_s = self.snapshot.at_s - span_s
        return sum(int(getattr(step, name)) for step in self.steps if step.at_s > begin_s) / span_s

    def _latest(self, name: str) -> float | None:
        now_s = 0.0 if self.snapshot is None else self.snapshot.at_s
        for row in reversed(self.history):
            if now_s - row.at_s > FRESH_S:
                return None
            value: float | None = getattr(row, name)
            if value is not None:
                return value
        return None


def json_fields(metrics: TopMetrics) -> dict[str, Any]:
    """Return the output of `quire top --once --json`. Its fields are stable; the guide lists them."""
    snapshot = metrics.snapshot
    if snapshot is None:
        return {"v": VERSION, "server": metrics.server, "model": None}
    pool = None
    if (cells := snapshot.shown_pool) is not None:
        counts = msgspec.structs.asdict(cells.counts)
        pool = {"num_blocks": cells.num_blocks, "block_size": cells.block_size, **counts}
    content: dict[str, Any] = {
        "v": VERSION,
        "server": metrics.server,
        "model": snapshot.model,
        "models": snapshot.models[:MAX_ROWS],
        "output_tokens_per_s": metrics.output_tokens_per_s,
        "prompt_tokens_per_s": metrics.prompt_tokens_per_s,
        "ttft_p50_s": metrics.ttft_p50_s,
        "hit_rate": metrics.hit_rate,
        "engine": snapshot.engine,
        "pool": pool,
        "num_running": len(snapshot.running),
        "num_waiting": sum(entry.num_requests for entry in snapshot.queue),
        "running": snapshot.running[:MAX_ROWS],
        "queue": snapshot.queue[:MAX_ROWS],
        "misses": snapshot.misses[:MAX_ROWS],
        "totals": snapshot.totals,
        "workers": snapshot.workers[:MAX_ROWS],
        "warnings": snapshot.warnings[:MAX_ROWS],
        "fleet": snapshot.fleet,
    }
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(content))
    return fields


def plain_line(metrics: TopMetrics) -> str:
    """Format the metrics as one line for a pipe or a log."""
    snapshot = metrics.snapshot
    if snapshot is None:
        return "no data yet"
    parts = [
        snapshot.model,
        f"{number(metrics.output_tokens_per_s)} tokens/s",
        f"{number(metrics.prompt_tokens_per_s)} prompt tokens/s",
        f"first token {duration(metrics.ttft_p50_s)}",
        f"hit rate {percent(metrics.hit_rate)}",
        f"{len(snapshot.running)} running",
        f"{sum(entry.num_requests for entry in snapshot.queue)} waiting",
    ]
    if (pool := snapshot.shown_pool) is not None:
        num_used = pool.num_blocks - pool.counts.free - pool.counts.cached
        parts.append(f"pool {percent(num_used / pool.num_blocks)} in use")
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
