"""Recent figures of requests: a row for every ten seconds of the last hour, and the timelines of those that ended.

Updated once for each request that ends, and every ten seconds from those that are open: never for a token.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Any

from quire.api.http.request_record import RequestRecord
from quire.api.watch.timeline import first_token_s, request_line

ROW_S = 10.0
MAX_ROWS = 360
MAX_ENDED = 200
MAX_FIRSTS = 1000
"""Times to the first token that a row's median is of."""

OpenRequests = Mapping[str, tuple[RequestRecord, object]]
"""By their ids, each with its caller."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """What came within one span."""

    at_s: float
    """Its end."""
    span_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Of prompts that were done, what was found in the cache among them."""
    ttft_p50_s: float | None
    """None: no first token came."""
    hit_rate: float | None
    """Of these prompts' tokens."""


@dataclass(slots=True)
class RequestTotals:
    """Since the server began."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0

    def add(self, record: RequestRecord) -> None:
        """This request's own."""
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_output_tokens
        self.num_requests += 1
        self.num_preemptions += sum(one.reply.num_preemptions for one in record.handles)


@dataclass(slots=True)
class _Span:
    """The row that is being filled."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    firsts_s: list[float] = field(default_factory=list)

    def count(self, record: RequestRecord) -> None:
        """Its first token has come, and was not counted yet."""
        at_s = first_token_s(record)
        if record.is_counted or at_s is None:
            return
        record.is_counted = True
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        if len(self.firsts_s) < MAX_FIRSTS:
            self.firsts_s.append(at_s - record.started_s)


class ModelActivity:
    """Of one model."""

    def __init__(self) -> None:
        self.ended = RequestTotals()
        """Of requests that have ended."""
        self.rows: deque[HistoryRow] = deque(maxlen=MAX_ROWS)
        self.num_rows = 0
        """That there ever were: the last of `rows` is this one."""
        self._span = _Span()
        self._num_output_tokens = 0

    def take(self, record: RequestRecord) -> None:
        """It has ended."""
        self._span.count(record)
        self.ended.add(record)

    def totals(self, records: list[RequestRecord]) -> RequestTotals:
        """With those that are open."""
        ended = self.ended
        totals = RequestTotals(
            ended.num_prompt_tokens,
            ended.num_cached_tokens,
            ended.num_output_tokens,
            ended.num_requests,
            ended.num_preemptions,
        )
        for record in records:
            totals.add(record)
        return totals

    def end_row(self, records: list[RequestRecord], now_s: float, span_s: float) -> None:
        """Ten seconds are over; these are open."""
        for record in records:
            self._span.count(record)
        span, self._span = self._span, _Span()
        num_output = self.ended.num_output_tokens + sum(record.num_output_tokens for record in records)
        row = HistoryRow(
            round(now_s, 3),
            round(span_s, 3),
            round((num_output - self._num_output_tokens) / span_s, 3),
            round(span.num_prompt_tokens / span_s, 3),
            round(median(span.firsts_s), 4) if span.firsts_s else None,
            round(span.num_cached_tokens / span.num_prompt_tokens, 4) if span.num_prompt_tokens else None,
        )
        self._num_output_tokens = num_output
        self.rows.append(row)
        self.num_rows += 1


class Activity:
    """Of all models. For one event loop."""

    def __init__(self, open_requests: OpenRequests) -> None:
        self._open_requests = open_requests
        self._models: dict[str, ModelActivity] = {}
        self._row_began_s: float | None = None
        self.timelines: deque[dict[str, Any]] = deque(maxlen=MAX_ENDED)
        """Of requests that have ended, the oldest first."""

    def of(self, model: str) -> ModelActivity:
        """A model that is served."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelActivity()
        return found

    def open_of(self, model: str) -> list[RequestRecord]:
        """Its open requests that were submitted."""
        return [record for record, _ in self._open_requests.values() if record.model == model and record.handles]

    def begin(self) -> None:
        """A request has come: from the first one on rows are made."""
        if self._row_began_s is None:
            self._row_began_s = monotonic()
            asyncio.get_running_loop().call_later(ROW_S, self._end_row)

    def take(self, record: RequestRecord) -> None:
        """It has ended, however."""
        if not record.handles:
            return
        self.of(record.model).take(record)
        self.timelines.append(request_line(record, monotonic()))

    def _end_row(self) -> None:
        now_s, began_s = monotonic(), self._row_began_s
        if began_s is not None:
            for name, model in self._models.items():
                model.end_row(self.open_of(name), now_s, now_s - began_s)
        self._row_began_s = now_s
        asyncio.get_running_loop().call_later(ROW_S, self._end_row)
