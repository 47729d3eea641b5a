"""What all routes share: the models, the open requests, and whether a new one is admitted.

A place is taken before a body is read and given back when the last byte is sent, so a flood is turned away for the
price of its headers. Who gets one, and who has to give one up, is a matter of shares: the core's rule
(`core/scheduling/shares.py`) over everybody who is here. Bodies that are still coming are bounded for each key, so that
one key that sends half of many bodies does not keep everybody else out.

Whatever a tenant is told about when to come back, by whomever, is a promise: a client that waits for the time is let in
here and by the engine.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, check_quota, opened_bill, rate_headers, text_tokens
from quire.api.access.conversation_store import ConversationStore
from quire.api.access.ignored_log import IgnoredLog
from quire.api.access.origins import Origins
from quire.api.access.warning_log import log_warning
from quire.api.http.body import Receive, declared_bytes, read_body
from quire.api.http.errors import ApiError, api_error_of
from quire.api.http.limits import ARRIVING_SHARE, BODY_S, FULL_RETRY_S
from quire.api.http.request_record import RequestRecord
from quire.api.models.registry import Models
from quire.api.watch.activity import Activity
from quire.api.watch.watchers import Watchers
from quire.client.prefix.prefix_guard import PrefixGuard
from quire.client.prefix.reuse_log import ReuseLog
from quire.client.request.conversation import NOTHING_LISTED, StablePrefix
from quire.client.request.text_pool import TextPool
from quire.core.scheduling.shares import Bounds, NoRoom, Promises, Room, Shares
from quire.core.work_budget import WorkSpent
from quire.errors import DisplacedError, DrainingError
from quire.observe.metrics import Metrics

OPEN = ""
"""The one kind of request that is counted here: what it asks for is not known before its body is read."""
NOT_NOW = (429, 503)
"""Answers that cost nothing: the request came at a bad time."""


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
    """Whether people can talk to the models at /, in a browser."""
    stable_prefix: StablePrefix = NOTHING_LISTED
    """Lines that are taken out of system texts."""
    store: ConversationStore | None = None
    """Where conversations are kept that clients go on with by an id. None: nowhere."""


class Admission:
    """The one thing every route reaches. On one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: AdmissionSettings | None = None) -> None:
        self.models = models
        self.metrics = metrics
        for model in models:
            model.meters = metrics.token_meters(model.name)
        self.settings = settings or AdmissionSettings()
        self.open_requests: dict[str, tuple[RequestRecord, Caller]] = {}
        self.activity = Activity(self.open_requests)
        self.watchers = Watchers(self)
        self.is_draining = False
        self._emptied = asyncio.Event()
        self._shares = Shares(Bounds(self.settings.max_open_requests, (OPEN,), state="open"))
        self._promises = Promises()
        self._arriving: Counter[str] = Counter()
        """Bodies that are still coming, by tenant."""
        self.reuse_log = ReuseLog()
        """What prompts found in the cache lately, of all models."""
        self.prefix_guard = PrefixGuard(log_warning, metrics.count_guarded)
        """What keeps them from being found again and again."""
        self.ignored_log = IgnoredLog()
        """Parameters that clients send and no dialect reads."""
        self.text_pool = TextPool()
        """Where text is worked on, beside the event loop: nothing whose size a client decides runs on it."""

    def work_spent(self) -> WorkSpent:
        """What outsiders' words have cost, here and in the engines."""
        stats = [model.stats() for model in self.models]
        return sum((one.work for one in stats if one is not None), self.text_pool.budget.spent())

    @property
    def is_ready(self) -> bool:
        """Somebody who came now would be answered."""
        return not self.is_draining and self.models.is_ready

    @contextmanager
    def admit(self, record: RequestRecord, caller: Caller) -> Iterator[None]:
        """Be inside, perhaps in the place of another, or be told why not."""
        if self.is_draining:
            raise DrainingError("the server is shutting down; ask another one, or later")
        quota = caller.quota
        if quota.concurrent is not None and quota.num_open >= quota.concurrent:
            message = f"this key may have {quota.concurrent} requests at once, {quota.num_open} are open; wait for one"
            raise ApiError(429, "rate_limit_exceeded", message, None, FULL_RETRY_S, rate_headers(caller))
        self._take_place(record, caller.tenant)
        quota.num_open += 1
        self.open_requests[record.request_id] = (record, caller)
        self._emptied.clear()
        self.activity.begin()
        try:
            yield
        finally:
            self.ignored_log.note(record)
            quota.num_open -= 1
            if record.request_id in self._shares:  # who was displaced has given it back before
                self._shares.give_back(record.request_id)
                self._shares.left(monotonic())
            del self.open_requests[record.request_id]
            self.activity.take(record)
            if not self.open_requests:
                self._emptied.set()

    async def body(self, record: RequestRecord, caller: Caller, receive: Receive) -> bytes:
        """All of a request's body. A key that has nothing left, or sends too many at once, is told so before."""
        declared, tenant = record.headers.get("content-length"), caller.tenant
        async with record.entering():
            check_quota(caller, text_tokens(declared_bytes(declared), self.models))
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
        limit = most if caller.is_everybody else max(1, int(most * ARRIVING_SHARE))
        if num_arriving >= limit:
            message = f"this key may send {limit} bodies at once, {num_arriving} are coming; send them faster"
            # By then each of them has come, or was given up.
            raise ApiError(429, "rate_limit_exceeded", message, None, BODY_S, rate_headers(caller))

    @contextmanager
    def billed(self, caller: Caller, record: RequestRecord, num_body_bytes: int) -> Iterator[Bill]:
        """Charge for a body before it is looked at. What is told to come back later has cost nothing."""
        bill = opened_bill(caller, text_tokens(num_body_bytes, self.models))
        try:
            yield bill
        except Exception as error:
            refusal = api_error_of(error, record.request_id)
            if refusal.status not in NOT_NOW:
                raise
            bill.refund()
            raise refusal from error

    def told(self, record: RequestRecord, refusal: ApiError) -> None:
        """A refusal is about to be sent. When it says to come back, in whole seconds, is remembered."""
        if refusal.retry_after_s is not None and record.tenant:
            self._promises.tell(record.tenant, monotonic(), max(1, ceil(refusal.retry_after_s)))

    def _take_place(self, record: RequestRecord, tenant: str) -> None:
        """Raises QueueFullError or TenantShareError."""
        now_s, shares = monotonic(), self._shares
        record.is_promised = tenant in self._promises and self._promises.come(tenant, now_s)
        room = shares.ask(tenant, OPEN, now_s, is_promised=record.is_promised)
        while isinstance(room, Room) and room.gives_up is not None and self._has_begun(room.gives_up):
            # What has begun is not broken off: it keeps its place, and another is looked for.
            shares.settle(room.gives_up)
            room = shares.judge(tenant, OPEN)
        if isinstance(room, NoRoom):
            raise room.error
        if room.gives_up is not None:
            self._displace(self.open_requests[room.gives_up][0])
        if room.is_promised:
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
        """Let nobody in, wait for those inside, then end what is left; how many had to be ended."""
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
        """Whether everybody left in time."""
        if self.open_requests:
            try:
                await asyncio.wait_for(self._emptied.wait(), within_s)
            except TimeoutError:
                return False
        return True


def _ended() -> DrainingError:
    return DrainingError("the server is shutting down and ended this request; ask again elsewhere, or later")
