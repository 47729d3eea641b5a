"""Recent request metrics: one row per ten seconds for the last hour, and the timelines of ended requests.

Updated when a request ends, and every ten seconds from the open requests; never per token.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any

from quire.api.http.request_record import RequestRecord
from quire.api.watch.timeline import first_token_s, timeline_of

ROW_S = 10.0
MAX_ROWS = 360
MAX_TIMELINES = 200
MAX_TTFTS = 1000
"""Maximum number of TTFTs (times to first token) from which a row's median is computed."""

OpenRequests = Mapping[str, tuple[RequestRecord, object]]
"""Open requests by id, each with its caller."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The metrics of one time span, about ten seconds long."""

    at_s: float
    """The time at which the span ended."""
    span_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens of the requests whose first token arrived in this span, cached tokens included."""
    ttft_p50_s: float | None
    """The median TTFT; None: no request had its first token in this span."""
    hit_rate: float | None
    """The cached fraction of the prompt tokens counted in `prompt_tokens_per_s`."""


@dataclass(slots=True)
class RequestTotals:
    """Sums over the requests since the server started."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0

    def add(self, record: RequestRecord) -> None:
        """Add the counts of one request."""
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_output_tokens
        self.num_requests += 1
        self.num_preemptions += sum(handle.reply.num_preemptions for handle in record.handles)


@dataclass(slots=True)
class _CurrentRow:
    """The counts of the current, unfinished row."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    def count(self, record: RequestRecord) -> None:
        """Count the request if its first token has arrived and it was not counted before."""
        first_s = first_token_s(record)
        if record.is_counted or first_s is None:
            return
        record.is_counted = True
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        if len(self.ttfts_s) < MAX_TTFTS:
            self.ttfts_s.append(first_s - record.started_s)


class ModelActivity:
    """The metrics of one model."""

    def __init__(self) -> None:
        self.ended = RequestTotals()
        """Sums over ended requests."""
        self.rows: deque[HistoryRow] = deque(maxlen=MAX_ROWS)
        self.num_rows = 0
        """Number of rows ever added, which is the number of the last row in `rows`."""
        self._current = _CurrentRow()
        self._num_output_tokens = 0

    def count_ended(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._current.count(record)
        self.ended.add(record)

    def totals(self, records: list[RequestRecord]) -> RequestTotals:
        """Return the sums over ended and open requests."""
        totals = replace(self.ended)
        for record in records:
            totals.add(record)
        return totals

    def end_row(self, records: list[RequestRecord], now_s: float, span_s: float) -> None:
        """End the current row; `records` are the open requests."""
        for record in records:
            self._current.count(record)
        current, self._current = self._current, _CurrentRow()
        num_output = self.ended.num_output_tokens + sum(record.num_output_tokens for record in records)
        row = HistoryRow(
            round(now_s, 3),
            round(span_s, 3),
            round((num_output - self._num_output_tokens) / span_s, 3),
            round(current.num_prompt_tokens / span_s, 3),
            round(median(current.ttfts_s), 4) if current.ttfts_s else None,
            round(current.num_cached_tokens / current.num_prompt_tokens, 4) if current.num_prompt_tokens else None,
        )
        self._num_output_tokens = num_output
        self.rows.append(row)
        self.num_rows += 1


class Activity:
    """The metrics of all models. Used from one event loop."""

    def __init__(self, open_requests: OpenRequests) -> None:
        self._open_requests = open_requests
        self._models: dict[str, ModelActivity] = {}
        self._row_began_s = 0.0
        self.timelines: deque[dict[str, Any]] = deque(maxlen=MAX_TIMELINES)
        """Timelines of ended requests, the oldest first."""

    def of(self, model: str) -> ModelActivity:
        """Return the metrics of a served model."""
        return self._models.setdefault(model, ModelActivity())

    def open_of(self, model: str) -> list[RequestRecord]:
        """Return the model's open requests that were submitted to the engine."""
        return [record for record, _ in self._open_requests.values() if record.model == model and record.handles]

    def start(self) -> None:
        """Start to add rows periodically."""
        self._row_began_s = monotonic()
        asyncio.get_running_loop().call_later(ROW_S, self._end_row)

    def record_ended(self, record: RequestRecord) -> None:
        """Count a request that has ended, successfully or not, and store its timeline."""
        if not record.handles:
            return
        self.of(record.model).count_ended(record)
        self.timelines.append(timeline_of(record, monotonic()))

    def _end_row(self) -> None:
        now_s = monotonic()
        for name, model in self._models.items():
            model.end_row(self.open_of(name), now_s, now_s - self._row_began_s)
        self.start()
