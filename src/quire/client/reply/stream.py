"""A request as its caller holds it on the event loop: one bounded stream. A request that is not read is cancelled.

Unread pieces are kept, at most `max_pending` of them: more are joined, one for each answer, so that a reader that
paused for a moment finds everything in a few large pieces. They are kept up to `max_bytes`: beyond that
the consumer counts as stuck, the request is cancelled, and the consumer, should it come back, reads what was kept and
then a `StreamStuckError`. A consumer that goes away (`aclose`, a cancelled task, an abandoned generator) cancels its
request too.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.client.reply.outputs import Completion, Piece, joined
from quire.client.reply.reply import Reply
from quire.errors import QuireError, StreamStuckError

MAX_PENDING = 256
MAX_PENDING_BYTES = 1 << 20


class Stream:
    """Pieces of one request in their order, then the end. Used from the event loop only."""

    def __init__(
        self,
        request_id: str,
        cancel: Callable[[str], None],
        max_pending: int = MAX_PENDING,
        max_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._max_pending = self._join_at = max_pending
        self._max_bytes = max_bytes
        self._pieces: deque[Piece] = deque()
        self._num_bytes = 0
        self.is_over = False
        """Nothing more will be put in."""
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def wake(self, ready: asyncio.Event) -> None:
        """Set this event, which several streams may share, whenever there is something to take."""
        if self._ready.is_set():
            ready.set()
        self._ready = ready

    def put(self, pieces: list[Piece]) -> None:
        """Add what a step brought; too much of it unread ends the stream."""
        if self.is_over:
            return
        self._num_bytes += sum(piece.num_bytes for piece in pieces)
        if self._num_bytes > self._max_bytes:
            self._cancel(self.request_id)
            self.end(StreamStuckError(self.request_id, self._max_bytes))
            return
        self._pieces.extend(pieces)
        if len(self._pieces) > self._join_at:
            self._pieces = deque(joined(self._pieces))
            # Parts that take turns stay apart: joined with every piece, they would cost the square of their number.
            self._join_at = max(self._max_pending, 2 * len(self._pieces))
        self._ready.set()

    def end(self, error: QuireError | None = None) -> None:
        """No more pieces; an error is raised after the last one is read."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._ready.set()

    def stop(self, error: QuireError) -> None:
        """End the request as well; its reader gets the error."""
        if not self.is_over:
            self._cancel(self.request_id)
            self.end(error)

    def close(self) -> None:
        """The consumer is gone."""
        if not self.is_over:
            self._cancel(self.request_id)
            self.end()
        self._pieces.clear()
        self._num_bytes = 0

    def take(self) -> list[Piece]:
        """Everything unread, one piece for each answer. Without any: an empty list, or the error the stream ended by.

        `is_over` distinguishes the end from a pause.
        """
        if not self._pieces and self._error is not None:
            raise self._error
        # Most readers are there for every piece: one needs no joining.
        taken = joined(self._pieces) if len(self._pieces) > 1 else list(self._pieces)
        self._pieces.clear()
        self._num_bytes, self._join_at = 0, self._max_pending
        return taken

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self.is_over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        piece = self._pieces.popleft()
        self._num_bytes -= piece.num_bytes
        return piece


class RequestHandle(Stream):
    """A request that was submitted: its pieces as they come, then all of it; or why it was refused. Close it, whatever
    happens."""

    def __init__(self, reply: Reply, cancel: Callable[[str], None], forget: Callable[[str], object]) -> None:
        super().__init__(reply.request.request_id, cancel)
        self.reply = reply
        self._forget = forget

    def show(self, pieces: list[Piece]) -> None:
        if self.reply.refusal is not None:
            self.end(self.reply.refusal)
        elif pieces:
            self.put(pieces)
        if self.reply.is_done:
            self.end()

    def completion(self) -> Completion:
        """The request with its answers, as far as they came."""
        return self.reply.completion()

    def close(self) -> None:
        """Its reader does not wait any more: what still runs is ended."""
        super().close()
        self._forget(self.request_id)
