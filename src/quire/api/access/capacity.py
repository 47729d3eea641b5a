"""Whether there is room for one more: inside, and in each model's queue as it is seen from here; if not, until when.

The rule is the core's (`core/shares.py`), here over other counts: everybody who is inside, and everybody who is on the
way to an engine's queue or in it. The engine's own queue stays the judge; what it would turn away after its step is
turned away here at once. Whatever a tenant is told about when to come back is a promise that is kept at all of them:
a client that waits for the time is admitted, everywhere.
"""

from collections.abc import Callable
from math import ceil
from time import monotonic

from quire.api.access.request_record import RequestRecord
from quire.core.promises import Promises
from quire.core.share_types import Bounds, NoRoom, Room
from quire.core.shares import Shares
from quire.errors import DisplacedError

LOOK_AGAIN_S = 0.02
"""How often it is looked whether somebody has left a queue, while others are turned away."""
OPEN = ""
"""The one kind of request that is counted inside: what it asks for is not known before its body is read."""


class QueueView:
    """One engine's queue, seen from here: at most a step old."""

    def __init__(self, bounds: Bounds) -> None:
        self.shares = Shares(bounds)
        self._waiting: dict[str, RequestRecord] = {}
        self._looked_s = 0.0

    def judge(self, tenant: str, kind: str) -> Room | NoRoom:
        """What it would tell somebody who asked. Changes nothing."""
        self._look(monotonic())
        return self.shares.judge(tenant, kind)

    def enter(self, record: RequestRecord, tenant: str, kind: str) -> None:
        """Be on the way to the queue. Raises QueueFullError or TenantShareError.

        Whose place it takes is for the engine to say.
        """
        now_s = monotonic()
        self._look(now_s)
        room = self.shares.ask(tenant, kind, now_s, is_promised=record.is_promised)
        if isinstance(room, NoRoom):
            raise room.error
        if room.is_promised:
            self.shares.take_promised(record.request_id, tenant, now_s)
        else:
            self.shares.take(record.request_id, tenant, kind)
        self._waiting[record.request_id] = record

    def leave(self, record: RequestRecord, now_s: float) -> None:
        """It has begun, or it will not."""
        if self._waiting.pop(record.request_id, None) is not None:
            self.shares.give_back(record.request_id)
            if record.is_begun:
                self.shares.left(now_s)

    def _look(self, now_s: float) -> None:
        """A flood must not make everybody be looked at for each of its drops."""
        self.shares.advance(now_s)
        if now_s - self._looked_s > LOOK_AGAIN_S:
            self._looked_s = now_s
            for record in [one for one in self._waiting.values() if one.is_begun]:
                self.leave(record, now_s)


class CapacityBook:
    """Who is inside, who waits, and what tenants were told. On one event loop."""

    def __init__(self, max_open_requests: int, queue: Bounds | None) -> None:
        self._open = Shares(Bounds(max_open_requests, (OPEN,), state="open"))
        self._bounds = queue
        self._views: dict[str, QueueView] = {}
        self._promises = Promises()

    def enter(self, record: RequestRecord, tenant: str, find: Callable[[str], RequestRecord]) -> None:
        """Be inside, perhaps in the place of one who is found by its id. Raises QueueFullError or TenantShareError."""
        now_s = monotonic()
        record.is_promised = self._promises.come(tenant, now_s)
        room = self._open.ask(tenant, OPEN, now_s, is_promised=record.is_promised)
        while isinstance(room, Room) and room.gives_up is not None and find(room.gives_up).state == "running":
            # What has begun is not broken off: it keeps its place, and another is looked for.
            self._open.settle(room.gives_up)
            room = self._open.judge(tenant, OPEN)
        if isinstance(room, NoRoom):
            raise room.error
        if room.gives_up is not None:
            self._displace(find(room.gives_up))
        if room.is_promised:
            self._open.take_promised(record.request_id, tenant, now_s)
        else:
            self._open.take(record.request_id, tenant, OPEN)

    def _displace(self, record: RequestRecord) -> None:
        retry_after_s = self._open.retry_after_s(record.tenant, OPEN)
        self._open.give_back(record.request_id)
        record.end(DisplacedError(record.tenant, retry_after_s))

    def leave(self, record: RequestRecord) -> None:
        """It is over."""
        now_s = monotonic()
        if record.request_id in self._open:  # who was displaced has given it back before
            self._open.give_back(record.request_id)
            self._open.left(now_s)
        if record.model in self._views:
            self._views[record.model].leave(record, now_s)

    def wait(self, record: RequestRecord, model: str, tenant: str, kind: str) -> None:
        """Be on the way to a model's queue. Raises QueueFullError or TenantShareError."""
        if (view := self._view(model)) is not None:
            view.enter(record, tenant, kind)

    def judge(self, model: str, tenant: str, kind: str) -> NoRoom | None:
        """What somebody who was promised nothing would be told by a model's queue; None if it would be let in."""
        view = self._view(model)
        room = None if view is None else view.judge(tenant, kind)
        return room if isinstance(room, NoRoom) else None

    def has_room_for_all(self, model: str) -> bool:
        """Whether nobody could be turned away by a model's queue, whoever it is."""
        view = self._view(model)
        return view is None or view.shares.has_room_for_all

    def told(self, record: RequestRecord, retry_after_s: float) -> None:
        """A tenant is about to be told when to come back. Whole seconds, as it is sent."""
        if record.tenant:
            self._promises.tell(record.tenant, monotonic(), max(1, ceil(retry_after_s)))

    def _view(self, model: str) -> QueueView | None:
        if self._bounds is None:
            return None
        if model not in self._views:
            self._views[model] = QueueView(self._bounds)
        return self._views[model]
