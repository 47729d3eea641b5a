"""What all responses to a body have in common: a place, the body, the charge, and an end if the client disconnects.

    place ─► body ─► charge ─► answer
                     └─ ends when the client disconnects ─┘

A route that takes a body makes one of these. `GenerationResponse` runs a model; `TextResponse` only processes text.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.access.billing import Bill, rate_headers
from quire.api.dialects.field_names import FieldNames, ignored_names
from quire.api.http.body import ClientGoneError, parse_object, while_client_stays
from quire.api.http.limits import ON_LOOP_BYTES
from quire.api.http.request_record import RequestRecord
from quire.api.http.sse import Send, send_whole

T = TypeVar("T")
TextAnswer = Callable[[dict[str, Any], Admission, Caller], Awaitable[bytes]]
"""The fields of a body, the admission and the caller, to the JSON that is sent."""


class RunBeside(Protocol):
    """Runs work beside the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """The result of the work."""
        ...


@dataclass(frozen=True, slots=True)
class BodyRequest:
    """One request whose body is there and has been charged."""

    body: bytes
    record: RequestRecord
    bill: Bill
    send: Send


class BodyResponse(Response):
    """An ASGI response that is made while it is sent."""

    background = None

    def __init__(self, admission: Admission, caller: Caller) -> None:
        self._admission = admission
        self._caller = caller

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response; nothing is left running, however it ends."""
        record: RequestRecord = scope["quire.record"]
        try:
            with self._admission.admit(record, self._caller):
                body = await self._admission.body(record, self._caller, receive)
                with self._admission.billed(self._caller, record, len(body)) as bill:
                    self.check_early(body, record)
                    await while_client_stays(receive, self.answer(BodyRequest(body, record, bill, send)))
        except ClientGoneError:
            record.is_cut = True

    def check_early(self, body: bytes, record: RequestRecord) -> None:
        """Refuse what can be refused cheaply, before any work is begun."""

    async def answer(self, call: BodyRequest) -> None:
        """Send the whole response."""
        raise NotImplementedError

    async def run(self, work: Callable[[], T]) -> T:
        """Process text beside the event loop, in the tenant's own turn."""
        return await self._admission.text_pool.run(self._caller.tenant, work)

    async def sized(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Small things at once, large ones beside the loop: handing over costs more than a small thing takes."""
        return work() if num_bytes <= ON_LOOP_BYTES else await self.run(work)

    def limits(self) -> list[tuple[bytes, bytes]]:
        """Headers with the rest of the key's quota."""
        return [(name.encode(), value.encode()) for name, value in rate_headers(self._caller)]


class TextResponse(BodyResponse):
    """Work without a model: it takes a place, and is charged for its bytes."""

    def __init__(self, admission: Admission, caller: Caller, names: FieldNames, answer: TextAnswer) -> None:
        super().__init__(admission, caller)
        self._names = names
        self._answer = answer

    async def answer(self, call: BodyRequest) -> None:
        """One JSON object."""
        async with call.record.entering():
            fields = await self.sized(len(call.body), lambda: self._fields_of(call))
            data = await self._answer(fields, self._admission, self._caller)
        await send_whole(call.send, data, self.limits())

    def _fields_of(self, call: BodyRequest) -> dict[str, Any]:
        return checked_names(parse_object(call.body), self._names, call.record)


def checked_names(body: dict[str, Any], names: FieldNames, record: RequestRecord) -> dict[str, Any]:
    """The same body; names that no dialect reads are recorded for a response header. Raises ApiError for misspelt
    ones."""
    record.ignored = ignored_names(body, names)
    return body
