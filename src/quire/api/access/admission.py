"""Whether a new request is admitted, beside the models and the open requests that there are.

A place is taken before a body is read and released when the last byte is sent, so refusing a flood costs no more than
reading its headers. Shares decide which tenant gets a place and which gives one up: the core's rule
(`core/scheduling/shares.py`) over the tenants of all open requests. Bodies in transfer are bounded for each key, so
that one key that sends half of many bodies does not block the others.

Every Retry-After that a tenant receives, from any part of the server, is a reservation: a client that waits for the
time is admitted here and by the engine.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import Protocol

from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, check_quota, opened_bill, rate_headers
from quire.api.access.conversation_store import ConversationStore
from quire.api.access.ignored_log import IgnoredLog
from quire.api.access.origins import Origins
from quire.api.access.page_sessions import PageSessions
from quire.api.access.warning_log import log_warning
from quire.api.http.body import Receive, declared_bytes, read_body
from quire.api.http.errors import ApiError, api_error_of
from quire.api.http.limits import ARRIVING_SHARE, BODY_S, FULL_RETRY_S
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import Models
from quire.client.prefix.prefix_guard import PrefixGuard
from quire.client.prefix.reuse_log import ReuseLog
from quire.client.request.conversation import NOTHING_LISTED, StablePrefix
from quire.client.request.text_pool import TextPool
from quire.core.scheduling.shares import Bounds, Denied, Granted, RetryReservations, Shares
from quire.core.work_budget import WorkSpent
from quire.errors import DisplacedError, DrainingError
from quire.observe.metrics import Metrics

OPEN = ""
"""The one kind of request that is counted here: its class is not known before its body is read."""
NOT_NOW = (429, 503)
"""Refusals that cost nothing: the request came at a bad time."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What an operator decides about admission."""

    max_open_requests: int = 1024
    """Requests between their first and their last byte, all models together."""
    origins: Origins = field(default_factory=Origins)
    """Which web pages may use the server."""
    are_images_dropped: bool = False
    """A text stands where a picture was; otherwise requests with one are refused."""
    has_page: bool = True
    """Whether / serves a page to chat with the models."""
    stable_prefix: StablePrefix = NOTHING_LISTED
    """Lines that are taken out of system texts."""
    store: ConversationStore | None = None
    """Where conversations are stored that clients continue by an id. None: nowhere."""


class RequestObserver(Protocol):
    """Is called with every request that is admitted."""

    def begin(self) -> None:
        """One was admitted."""
        ...

    def take(self, record: RequestRecord, /) -> None:
        """It has ended, however."""
        ...


class Admission:
    """Shared by all routes. On one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: AdmissionSettings | None = None) -> None:
        self.models = models
        self.metrics = metrics
        for model in models:
            model.meters = metrics.token_meters(model.name)
        self.settings = settings or AdmissionSettings()
        self.open_requests: dict[str, tuple[RequestRecord, Caller]] = {}
        self.observers: list[RequestObserver] = []
        self.is_draining = False
        self._emptied = asyncio.Event()
        self._shares = Shares(Bounds(self.settings.max_open_requests, (OPEN,), state="open"))
        self._reservations = RetryReservations()
        self._arriving: Counter[str] = Counter()
        """Bodies that are still coming, by tenant."""
        self.reuse_log = ReuseLog()
        """What prompts found in the cache lately, of all models."""
        self.prefix_guard = PrefixGuard(log_warning, metrics.count_guarded)
        """What keeps them from being found again and again."""
        self.ignored_log = IgnoredLog()
        """Parameters that clients send and no dialect reads."""
        self.page_sessions = PageSessions()
        """Of pages that the operator opened without a key."""
        self.text_pool = TextPool()
        """Processes text beside the event loop: nothing whose size a client decides runs on it."""

    def work_spent(self) -> WorkSpent:
        """What processing clients' text has cost, here and in the engines."""
        stats = [model.stats() for model in self.models]
        return sum((one.work for one in stats if one is not None), self.text_pool.budget.spent())

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now would be served."""
        return not self.is_draining and self.models.is_ready

    @asynccontextmanager
    async def charged_body(
        self, record: RequestRecord, caller: Caller, receive: Receive
    ) -> AsyncIterator[tuple[bytes, Bill]]:
        """An admission slot, then all of the body, then its charge, before it is parsed. The slot is held until the
        response is sent; a refusal in NOT_NOW refunds the charge."""
        self._enter(record, caller)
        try:
            longest = self.models.max_sequence_tokens
            body = await self._body(record, caller, receive, longest)
            bill = opened_bill(caller, len(body), longest)
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
        """Take a slot, displacing another request if needed; raises the reason if there is none."""
        if self.is_draining:
            raise DrainingError("the server is shutting down; use another one, or retry later")
        quota = caller.quota
        if quota.concurrent is not None and quota.num_open >= quota.concurrent:
            message = (
                f"expected at most {quota.concurrent} open requests for this key, {quota.num_open} are open; "
                "wait for one to end"
            )
            raise ApiError(429, "rate_limit_exceeded", message, None, FULL_RETRY_S, rate_headers(caller))
        self._take_place(record, caller.tenant)
        quota.num_open += 1
        self.open_requests[record.request_id] = (record, caller)
        self._emptied.clear()
        for observer in self.observers:
            observer.begin()

    def _leave(self, record: RequestRecord, caller: Caller) -> None:
        self.ignored_log.note(record)
        caller.quota.num_open -= 1
        if record.request_id in self._shares:  # a displaced request has released it before
            self._shares.give_back(record.request_id)
            self._shares.left(monotonic())
        del self.open_requests[record.request_id]
        for observer in self.observers:
            observer.take(record)
        if not self.open_requests:
            self._emptied.set()

    async def _body(self, record: RequestRecord, caller: Caller, receive: Receive, longest: int | None) -> bytes:
        """All of a request's body. A key without quota, or with too many bodies in transfer, is rejected before."""
        declared, tenant = record.headers.get("content-length"), caller.tenant
        async with record.before_engine():
            check_quota(caller, declared_bytes(declared), longest)
            self._check_arriving(caller)
            self._arriving[tenant] += 1
            try:
                return await read_body(receive, declared, lambda: self.text_pool.pause(tenant))
            finally:
                self._arriving[tenant] -= 1
                if not self._arriving[tenant]:
                    del self._arriving[tenant]

    def _check_arriving(self, caller: Caller) -> None:
        most, num_arriving = self.settings.max_open_requests, self._arriving[caller.tenant]
        limit = most if caller.is_anonymous else max(1, int(most * ARRIVING_SHARE))
        if num_arriving >= limit:
            message = (
                f"expected at most {limit} request bodies in transfer for this key, {num_arriving} are arriving; "
                "send them faster"
            )
            # By then each of them has arrived or timed out.
            raise ApiError(429, "rate_limit_exceeded", message, None, BODY_S, rate_headers(caller))

    def note_refusal(self, record: RequestRecord, refusal: ApiError) -> None:
        """A refusal is about to be sent: reserve a place at its Retry-After, in whole seconds."""
        if refusal.retry_after_s is not None and record.tenant:
            self._reservations.reserve(record.tenant, monotonic(), max(1, ceil(refusal.retry_after_s)))

    def _take_place(self, record: RequestRecord, tenant: str) -> None:
        """Raises QueueFullError or TenantShareError."""
        now_s, shares = monotonic(), self._shares
        record.has_reservation = self._reservations.redeem(tenant, now_s)
        room = shares.request_place(tenant, OPEN, now_s, has_reservation=record.has_reservation)
        while isinstance(room, Granted) and room.gives_up is not None and self._has_begun(room.gives_up):
            # A request that has begun is not cancelled: it keeps its place, and another is chosen.
            shares.settle(room.gives_up)
            room = shares.judge(tenant, OPEN)
        if isinstance(room, Denied):
            raise room.error
        if room.gives_up is not None:
            self._displace(self.open_requests[room.gives_up][0])
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

    async def drain(self, within_s: float, hurry: asyncio.Event) -> int:
        """Admit no new requests, wait for the open ones, then end the rest; how many had to be ended."""
        self.is_draining = True
        if self.models.park is not None:
            self.models.park.drain()
        if self.open_requests:
            emptied = asyncio.ensure_future(self._emptied.wait())
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait({emptied, hurried}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (emptied, hurried):
                waiting.cancel()
        return self._end_all()

    def _end_all(self) -> int:
        records = [record for record, _ in self.open_requests.values()]
        for record in records:
            record.end(_ended())
        return len(records)

    async def emptied(self, within_s: float) -> bool:
        """Whether all requests ended in time."""
        if self.open_requests:
            try:
                await asyncio.wait_for(self._emptied.wait(), within_s)
            except TimeoutError:
                return False
        return True


def _ended() -> DrainingError:
    return DrainingError("the server is shutting down and ended this request; use another one, or retry later")
