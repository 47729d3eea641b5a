"""A full house says so at its threshold: who would be turned away whatever the body says is turned away unparsed.

Routing, parsing and wording cost about half a millisecond, and under a flood that is taken from the processors that
compute for those inside. Nobody is let in here: the same key is asked for, the same places and bounds hold, and
whatever is not certain goes on to the route. A body that is wrong is told so when there is room to look at it.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller, Gate
from quire.api.access.request_record import RequestRecord
from quire.api.dialects.openai.fields import may_ask_for_a_class
from quire.api.http.body import Receive
from quire.api.http.errors import ApiError
from quire.core.request import PriorityClass
from quire.errors import CapacityError


class EarlyReject:
    """Looks at requests that would have to wait."""

    def __init__(self, admission: Admission, gate: Gate, queued_paths: Collection[str]) -> None:
        self._admission = admission
        self._gate = gate
        self._queued_paths = queued_paths

    @asynccontextmanager
    async def passed(self, scope: Any, receive: Receive, record: RequestRecord) -> AsyncIterator[Receive]:
        """Raise what the route would raise, or hand on what is still to be received.

        Whoever had to be looked at has a place from then on.
        """
        if not self._would_wait(scope):
            yield receive
            return
        headers = record.headers
        caller = self._gate.caller(headers.get("authorization"), headers.get("x-api-key"))
        record.tenant = caller.tenant
        if caller.ceiling is PriorityClass.LOW or self._full(caller, record) is None:
            yield receive
            return
        with self._admission.admit(record, caller):
            body = await self._admission.body(record, caller, receive)
            full = self._full(caller, record)
            if full is not None and not may_ask_for_a_class(body, headers):
                raise full
            yield _again(body, receive)

    def told(self, record: RequestRecord, refusal: ApiError) -> None:
        """A refusal is about to be sent."""
        self._admission.told(record, refusal)

    def _full(self, caller: Caller, record: RequestRecord) -> CapacityError | None:
        """What this caller would be told; whoever comes at a time it was told to is told nothing."""
        return None if record.is_promised else self._admission.full_for(caller.tenant, PriorityClass.NORMAL)

    def _would_wait(self, scope: Any) -> bool:
        is_queued = scope["method"] == "POST" and scope["path"] in self._queued_paths
        return is_queued and self._admission.is_full_for_somebody


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, once more, and then whatever comes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return left.pop() if left else await receive()

    return replay
