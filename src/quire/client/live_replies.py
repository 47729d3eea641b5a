"""The replies that are still being written, by request: each takes its own of what an engine says.

For one thread that steps by itself and for many tasks on an event loop alike. What came is handed to whom it is for;
answers that a stop string ended are ended in the engine too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from quire.client.outputs import Piece
from quire.client.reply import Reply
from quire.core.events import RequestEvent

CancelAnswer = Callable[[str, int], None]


class Recipient(Protocol):
    """Whom a reply is for."""

    @property
    def reply(self) -> Reply:
        """What it has so far."""
        ...

    def take(self, pieces: list[Piece]) -> None:
        """These are new; or it is done, or refused."""
        ...


R = TypeVar("R", bound=Recipient)


class LiveReplies(Generic[R]):
    """From submission to the last event."""

    def __init__(self, cancel_answer: CancelAnswer) -> None:
        self._cancel_answer = cancel_answer
        self._recipients: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._recipients)

    def __iter__(self) -> Iterator[R]:
        return iter(self._recipients.values())

    def add(self, recipient: R) -> None:
        """From now on it is told."""
        self._recipients[recipient.reply.request.request_id] = recipient

    def forget(self, request_id: str) -> bool:
        """Nobody waits for it any more; false if nobody did."""
        return self._recipients.pop(request_id, None) is not None

    def take(self, events: Sequence[RequestEvent]) -> None:
        """Tell everybody what is theirs, once."""
        own: dict[str, list[RequestEvent]] = {}
        for event in events:
            own.setdefault(event.request_id, []).append(event)
        for request_id, its_events in own.items():
            recipient = self._recipients.get(request_id)
            if recipient is not None:
                self._tell(request_id, recipient, its_events)

    def _tell(self, request_id: str, recipient: R, events: list[RequestEvent]) -> None:
        reply = recipient.reply
        pieces = reply.take(events)
        if reply.is_done:
            del self._recipients[request_id]
        elif reply.stopped:
            stopped, reply.stopped = reply.stopped, []
            for index in stopped:
                self._cancel_answer(request_id, index)
        recipient.take(pieces)
