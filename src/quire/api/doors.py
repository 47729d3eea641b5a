"""What all doors share: the models, who is inside, and whether anybody new is let in.

A place is taken before a body is read and given back when the last byte is sent, so a flood is turned away for the
price of its headers. The engine's own queue stays the judge of classes and shares; this bound only keeps what is on
its way there finite. Bodies that are still coming are bounded for each key, so that one key that sends half of many
bodies does not keep everybody else out.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from quire.api.auth import Caller
from quire.api.billing import Bill, check_quota, opened_bill, rate_headers, text_tokens
from quire.api.body import Receive, declared_bytes, read_body
from quire.api.limits import ARRIVING_SHARE, FULL_RETRY_S
from quire.api.models import Models
from quire.api.origins import Origins
from quire.api.refusals import Refusal, refusal_of
from quire.api.text_work import TextWork
from quire.api.visits import Visit
from quire.core.request import PriorityClass
from quire.engine.text_pool import TextPool
from quire.errors import CapacityError, DrainingError, QueueFullError, TenantShareError
from quire.observe.metrics import Metrics

CLASS_RESERVE = 0.1
"""The share of a queue that is kept for each class; the engine's own default."""
COUNT_AGAIN_S = 0.02
NOT_NOW = (429, 503)
"""Answers that cost nothing: the request came at a bad time."""


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """What an operator decides about the doors."""

    max_inside: int = 1024
    """Requests between their first and their last byte, all models together."""
    queue: int | None = None
    """Requests that may wait in an engine's queue, where that is known."""
    origins: Origins = field(default_factory=Origins)
    """Which web pages may use the server."""


class Doors:
    """The one thing every route reaches. On one event loop."""

    def __init__(self, models: Models, metrics: Metrics, settings: DoorSettings | None = None) -> None:
        self.models = models
        self.metrics = metrics
        self.settings = settings or DoorSettings()
        self.inside: dict[str, tuple[Visit, Caller]] = {}
        self.is_draining = False
        self._emptied = asyncio.Event()
        self._counts: dict[str, tuple[float, Counter[str]]] = {}
        """Who waits for which model, and when that was counted."""
        self._arriving: Counter[str] = Counter()
        """Bodies that are still coming, by tenant."""
        self._text_pool = TextPool()

    @property
    def is_ready(self) -> bool:
        """Somebody who came now would be answered."""
        return not self.is_draining and self.models.is_ready

    @contextmanager
    def place(self, visit: Visit, caller: Caller) -> Iterator[None]:
        """Be inside, or be told why not. Who is inside already stays."""
        if visit.request_id in self.inside:
            yield
            return
        self._check_open()
        quota = caller.quota
        if quota.concurrent is not None and quota.num_open >= quota.concurrent:
            message = f"this key may have {quota.concurrent} requests at once, {quota.num_open} are open; wait for one"
            raise Refusal(429, "rate_limit_exceeded", message, None, FULL_RETRY_S, rate_headers(caller))
        quota.num_open += 1
        self.inside[visit.request_id] = (visit, caller)
        self._emptied.clear()
        try:
            yield
        finally:
            quota.num_open -= 1
            del self.inside[visit.request_id]
            if not self.inside:
                self._emptied.set()

    @contextmanager
    def arriving(self, caller: Caller) -> Iterator[None]:
        """While a body comes."""
        most, tenant = self.settings.max_inside, caller.tenant
        limit = most if caller.is_everybody else max(1, int(most * ARRIVING_SHARE))
        if self._arriving[tenant] >= limit:
            message = f"this key may send {limit} bodies at once, {self._arriving[tenant]} are coming; send them faster"
            raise Refusal(429, "rate_limit_exceeded", message, None, FULL_RETRY_S, rate_headers(caller))
        self._arriving[tenant] += 1
        try:
            yield
        finally:
            self._arriving[tenant] -= 1
            if not self._arriving[tenant]:
                del self._arriving[tenant]

    def text_work(self, caller: Caller) -> TextWork:
        """Where this caller's text is worked on."""
        return TextWork(self._text_pool, caller.tenant)

    async def body(self, visit: Visit, caller: Caller, receive: Receive, declared: bytes | None) -> bytes:
        """All of a request's body. A key that has nothing left is told so before it is read."""
        async with visit.entering():
            check_quota(caller, text_tokens(declared_bytes(declared), self.models))
            with self.arriving(caller):
                return await read_body(receive, declared)

    @contextmanager
    def billed(self, caller: Caller, visit: Visit, num_body_bytes: int) -> Iterator[Bill]:
        """Charge for a body before it is looked at. What is told to come back later has cost nothing."""
        bill = opened_bill(caller, text_tokens(num_body_bytes, self.models))
        try:
            yield bill
        except Exception as error:
            if refusal_of(error, visit.request_id).status in NOT_NOW:
                bill.refund()
            raise

    def check_room(self, visit: Visit, model: str, priority: PriorityClass) -> None:
        """Turn away at once what the engine's queue, as it is seen from here, would turn away after its step.

        The same rule: a tenth of the queue is kept for each class. What is seen here is at most a step old: a place
        that became free in the step that runs is given away after it.
        """
        if (full := self._fullness(model, priority)) is not None:
            raise full
        self._waiting(model)[priority.value] += 1
        visit.model, visit.priority = model, priority.value

    def full_for(self, priority: PriorityClass) -> QueueFullError | None:
        """What is said to this class, whichever model it asks for; None where one of them would take it."""
        said = None
        for model in self.models:
            if (said := self._fullness(model.name, priority)) is None:
                return None
        return said

    def _fullness(self, model: str, priority: PriorityClass) -> QueueFullError | None:
        if (queue := self.settings.queue) is None:
            return None
        waiting, reserve = self._waiting(model), int(queue * CLASS_RESERVE)
        limit = queue - sum(max(0, reserve - waiting[one.value]) for one in PriorityClass if one is not priority)
        return QueueFullError(waiting.total(), limit) if waiting.total() >= limit else None

    def _waiting(self, model: str) -> Counter[str]:
        """How many wait for this model, by class. A flood must not make everybody be counted for each of its drops."""
        now_s = monotonic()
        counted_s, waiting = self._counts.get(model, (0.0, Counter[str]()))
        if now_s - counted_s > COUNT_AGAIN_S:
            others = (visit for visit, _ in self.inside.values() if visit.model == model)
            waiting = Counter(visit.priority for visit in others if visit.is_waiting)
            self._counts[model] = (now_s, waiting)
        return waiting

    def full(self, error: TenantShareError) -> CapacityError:
        """A share that is the whole queue is no tenant's fault: then it is the server that is full."""
        is_everything = self.settings.queue is not None and error.limit >= self.settings.queue
        return QueueFullError(error.num_waiting, error.limit) if is_everything else error

    async def drain(self, within_s: float, hurry: asyncio.Event) -> int:
        """Let nobody in, wait for those inside, then end what is left; how many had to be ended."""
        self.is_draining = True
        if self.inside:
            emptied = asyncio.ensure_future(self._emptied.wait())
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait({emptied, hurried}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (emptied, hurried):
                waiting.cancel()
        return self._end_all()

    def _end_all(self) -> int:
        visits = [visit for visit, _ in self.inside.values()]
        for visit in visits:
            visit.end(_ended())
        return len(visits)

    async def emptied(self, within_s: float) -> bool:
        """Whether everybody left in time."""
        if self.inside:
            try:
                await asyncio.wait_for(self._emptied.wait(), within_s)
            except TimeoutError:
                return False
        return True

    def _check_open(self) -> None:
        if self.is_draining:
            raise DrainingError("the server is shutting down; ask another one, or later")
        if len(self.inside) >= self.settings.max_inside:
            raise QueueFullError(len(self.inside), self.settings.max_inside)


def _ended() -> DrainingError:
    return DrainingError("the server is shutting down and ended this request; ask again elsewhere, or later")
