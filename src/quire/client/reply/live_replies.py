"""Replies that are still open, by request: each takes its own of an engine's events.

For one thread that steps by itself and for many tasks on an event loop alike. Each event goes to the reply it belongs
to; answers that a stop string ended are ended in the engine too.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.core.events import RequestEvent

CancelAnswer = Callable[[str, int], None]


class Recipient(Protocol):
    """The receiver of a reply."""

    @property
    def reply(self) -> Reply: ...

    def show(self, pieces: list[Piece]) -> None:
        """These are new; or it is done, or refused."""


R = TypeVar("R", bound=Recipient)


def hand_out(events: Sequence[RequestEvent], live: dict[str, R], cancel_answer: CancelAnswer) -> None:
    """Hand each recipient its events, once. After its last event it is not in `live` any more."""
    own: dict[str, list[RequestEvent]] = {}
    for event in events:
        own.setdefault(event.request_id, []).append(event)
    for request_id, its_events in own.items():
        recipient = live.get(request_id)
        if recipient is None:
            continue
        reply = recipient.reply
        pieces = reply.take(its_events)
        if reply.is_done:
            del live[request_id]
        elif reply.stopped:
            stopped, reply.stopped = reply.stopped, []
            for index in stopped:
                cancel_answer(request_id, index)
        recipient.show(pieces)
