"""Admission control: decide whether a new request is accepted.

A request takes an admission slot before its body is read and releases it after the last byte of the response, so a
flood of refused requests costs only the parsing of headers. The core's fair shares (`core/scheduling/shares.py`) decide
which tenant gets a slot, and which request is *displaced*: ended with an error that asks its client to retry. Request
bodies in transfer are bounded per key, so that a key with many unfinished uploads does not block others.

Every Retry-After sent to a tenant, by any part of the server, is a reservation: a client that retries at that time is
admitted, here and by the engine.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, check_quota, open_bill, rate_headers
from quire.api.access.conversation_store import ConversationStore
from quire.api.access.operator_log import IgnoredLog, log_warning
from quire.api.access.origins import Origins
from quire.api.access.page_sessions import PageSessions
from quire.api.http.body import Receive, read_body
from quire.api.http.errors import ApiError, api_error_of
from quire.api.http.limits import BODY_S, FULL_RETRY_S, MAX_UPLOADS_SHARE
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import Models
from quire.client.prefix.prefix_guard import PrefixGuard
from quire.client.prefix.reuse_log import ReuseLog
from quire.client.request.conversation import StablePrefix
from quire.client.request.text_pool import TextPool
from quire.core.scheduling.shares import Bounds, Denied, Granted, RetryReservations, Shares
from quire.core.work_budget import WorkSpent
from quire.errors import DisplacedError, DrainingError
from quire.observe.metrics import Metrics

OPEN = ""
"""The only kind of request in these shares: the priority class, their usual kind, is in the body, not read yet."""
CLOSE_GRACE_S = 2.0
"""Time for ended streams to send their error at shutdown."""
NOT_NOW = (429, 503)
"""Status codes of refusals that refund the charge, because the request itself is valid."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The operator's settings of admission, pages and stored conversations."""

    max_open_requests: int = 1024
    """Maximum requests between their first and last byte, over all models."""
    first_byte_s: float = 10.0
    """Maximum time from a stream's body to its first byte; 0: no limit."""
    origins: Origins = field(default_factory=Origins)
    """The web pages that may use the server."""
    are_images_dropped: bool = False
    """Whether images in requests are replaced by a placeholder text; otherwise requests with images are refused."""
    has_page: bool = True
    """Whether the server has web pages: a chat at `/`, and `/dashboard`."""
    are_loops_stopped: bool = False
    """Whether answers that repeat themselves are ended if a request does not set `stop_loops`."""
    thought_limits: Mapping[str, int] = field(default_factory=dict)
    """Maximum reasoning tokens by effort, for requests without a budget."""
    stable_prefix: StablePrefix | None = None
    """Removes configured lines from system texts; None: no lines are configured."""
    store: ConversationStore | None = None
    """Stores conversations that clients continue by id; None: they are not stored."""


class Admission:
    """Admission state shared by all routes. Used from one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: AdmissionSettings | None = None) -> None:
        self.models = models
        self.metrics = metrics
        for model in models:
            model.meters = metrics.token_meters(model.name)
        self.settings = settings or AdmissionSettings()
        self.open_requests: dict[str, tuple[RequestRecord, Caller]] = {}
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Called with every admitted request after it has ended, for any reason."""
        self.is_draining = False
        self._no_open_requests = asyncio.Event()
        self._shares = Shares(Bounds(self.settings.max_open_requests, (OPEN,), state="open"))
        self._reservations = RetryReservations()
        self._num_uploads: Counter[str] = Counter()
        """Number of request bodies in transfer, by tenant."""
        self.reuse_log = ReuseLog()
        """Cache lookups of recent prompts of all models."""
        self.prefix_guard = PrefixGuard(log_warning, metrics.count_guarded)
        """Detects prompt lines that repeatedly cause cache misses."""
        self.ignored_log = IgnoredLog()
        """Logs unknown body parameters, which no dialect (an API's request format) reads."""
        self.page_sessions = PageSessions()
        """Sessions of pages that the operator opened with `quire dashboard`, which need no API key."""
        self.text_pool = TextPool()
        """Threads for processing text, because work whose size a client determines must not run on the event loop."""

    def work_spent(self) -> WorkSpent:
        """Return the CPU time spent on processing text, in this process and in the engines."""
        stats = [model.stats() for model in self.models]
        return sum((engine.work for engine in stats if engine is not None), self.text_pool.budget.spent())

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be admitted and served."""
        return not self.is_draining and self.models.is_ready

    @asynccontextmanager
    async def charged_body(
        self, record: RequestRecord, caller: Caller, receive: Receive
    ) -> AsyncIterator[tuple[bytes, Bill]]:
        """Take an admission slot until the context ends, read the body, and charge it to the quota before parsing.
        An error with a status in NOT_NOW refunds the charge."""
        self._enter(record, caller)
        try:
            max_tokens = self.models.max_sequence_tokens
            body = await self._get_body(record, caller, receive, max_tokens)
            bill = open_bill(caller, len(body), max_tokens)
            try:
                yield body, bill
            except Exception as error:
                refusal = api_error_of(error, record.request_id)
                if refusal.status not in NOT_NOW:
                    raise
                bill.refund()
                raise refusal from error
        finally:
            self._leave(record, caller)

    def _enter(self, record: RequestRecord, caller: Caller) -> None:
        """Take a slot, displacing another request if needed. Raises CapacityError, or ApiError for the quota."""
        if self.is_draining:
            raise DrainingError("the server is shutting down; use another one, or retry later")
        quota = caller.quota
        if quota.concurrent is not None and quota.num_open >= quota.concurrent:
            message = (
                f"expected at most {quota.concurrent} open requests for this key, {quota.num_open} are open; "
                "wait for one to end"
            )
            raise ApiError(429, "rate_limit_exceeded", message, None, FULL_RETRY_S, rate_headers(caller))
        self._take_slot(record, caller.tenant)
        quota.num_open += 1
        self.open_requests[record.request_id] = (record, caller)
        self._no_open_requests.clear()

    def _leave(self, record: RequestRecord, caller: Caller) -> None:
        self.ignored_log.note(record)
        caller.quota.num_open -= 1
        if record.request_id in self._shares:  # a displaced request has already released its slot
            self._shares.give_back(record.request_id)
            self._shares.record_departure(monotonic())
        del self.open_requests[record.request_id]
        for observer in self.observers:
            observer(record)
        if not self.open_requests:
            self._no_open_requests.set()

    async def _get_body(self, record: RequestRecord, caller: Caller, receive: Receive, max_tokens: int | None) -> bytes:
        """Read the request's body. Raises ApiError before if the quota is exhausted or too many uploads run."""
        declared, tenant = record.headers.get("content-length"), caller.tenant
        num_declared = int(declared[:20]) if declared is not None and declared.isdecimal() else 0
        async with record.before_engine():
            check_quota(caller, num_declared, max_tokens)
            self._check_uploads(caller)
            self._num_uploads[tenant] += 1
            try:
                return await read_body(receive, declared, lambda: self.text_pool.pause(tenant))
            finally:
                self._num_uploads[tenant] -= 1
                if not self._num_uploads[tenant]:
                    del self._num_uploads[tenant]

    def _check_uploads(self, caller: Caller) -> None:
        max_open, num_uploads = self.settings.max_open_requests, self._num_uploads[caller.tenant]
        limit = max_open if caller.is_anonymous else max(1, int(max_open * MAX_UPLOADS_SHARE))
        if num_uploads >= limit:
            message = (
                f"expected at most {limit} request bodies in transfer for this key, got {num_uploads}; send them faster"
            )
            # After BODY_S, each of these bodies has been received or has timed out.
            raise ApiError(429, "rate_limit_exceeded", message, None, BODY_S, rate_headers(caller))

    def note_refusal(self, record: RequestRecord, refusal: ApiError) -> None:
        """Reserve an admission slot for the Retry-After of a refusal, in whole seconds, before it is sent."""
        if refusal.retry_after_s is not None and record.tenant:
            self._reservations.reserve(record.tenant, monotonic(), max(1, ceil(refusal.retry_after_s)))

    def _take_slot(self, record: RequestRecord, tenant: str) -> None:
        """Take a slot by the fair shares. Raises QueueFullError or TenantShareError."""
        now_s, shares = monotonic(), self._shares
        record.has_reservation = self._reservations.redeem(tenant, now_s)
        room = shares.request_place(tenant, OPEN, now_s, has_reservation=record.has_reservation)
        while isinstance(room, Granted) and room.displaced_name is not None and self._has_begun(room.displaced_name):
            # A running request is not displaced: it is excluded, and the shares choose another request.
            shares.settle(room.displaced_name)
            room = shares.judge(tenant, OPEN)
        if isinstance(room, Denied):
            raise room.error
        if room.displaced_name is not None:
            self._displace(self.open_requests[room.displaced_name][0])
        if room.has_reservation:
            shares.take_promised(record.request_id, tenant, now_s)
        else:
            shares.take(record.request_id, tenant, OPEN)

    def _has_begun(self, request_id: str) -> bool:
        return self.open_requests[request_id][0].state == "running"

    def _displace(self, record: RequestRecord) -> None:
        retry_after_s = self._shares.retry_after_s(record.tenant, OPEN)
        self._shares.give_back(record.request_id)
        record.end(DisplacedError(record.tenant, retry_after_s))

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> int:
        """Stop admitting, wait for open requests until `hurry` is set, end the rest with an error; return how many."""
        self.is_draining = True
        self.models.drain()
        if self.open_requests:
            tasks = [asyncio.ensure_future(event.wait()) for event in (self._no_open_requests, hurry)]
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        late = [record for record, _ in self.open_requests.values()]
        for record in late:
            record.end(
                DrainingError("the server is shutting down and ended this request; use another one, or retry later")
            )
        if late:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._no_open_requests.wait(), CLOSE_GRACE_S)
        return len(late)
