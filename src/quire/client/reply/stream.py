"""A bounded stream of pieces between the engine and one consumer. A request whose stream is not read is cancelled.

Unread pieces are buffered. More than `max_pending` pieces are merged, so that a consumer that paused briefly reads
them as a few large pieces. If they exceed `max_bytes`, the request is cancelled: the consumer counts as stuck and, if
it continues, reads the buffered pieces and then a `StreamStuckError`. Closing the stream (`close`, which callers run
if a task is cancelled or a generator is closed) cancels the request too.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.client.reply.outputs import Completion, Piece, merge_pieces
from quire.client.reply.reply import Reply
from quire.errors import QuireError, StreamStuckError

MAX_PENDING = 256
MAX_PENDING_BYTES = 1 << 20


class Stream:
    """The pieces of one request in order, then its end. Used from the event loop only."""

    def __init__(
        self,
        request_id: str,
        cancel: Callable[[str], None],
        max_pending: int = MAX_PENDING,
        max_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._max_pending = self._merge_at = max_pending
        self._max_bytes = max_bytes
        self._pieces: deque[Piece] = deque()
        self._num_bytes = 0
        self.is_over = False
        """Whether no more pieces will be added."""
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def wake(self, ready: asyncio.Event) -> None:
        """Set this event, which several streams may share, whenever pieces are available."""
        if self._ready.is_set():
            ready.set()
        self._ready = ready

    def put(self, pieces: list[Piece]) -> None:
        """Add pieces of a step. More than `max_bytes` unread end the stream and cancel the request."""
        if self.is_over:
            return
        self._num_bytes += sum(piece.num_bytes for piece in pieces)
        if self._num_bytes > self._max_bytes:
            self._cancel(self.request_id)
            self.end(StreamStuckError(self.request_id, self._max_bytes))
            return
        self._pieces.extend(pieces)
        if len(self._pieces) > self._merge_at:
            self._pieces = deque(merge_pieces(self._pieces))
            # Pieces of alternating parts cannot be merged; doubling the threshold avoids quadratic cost.
            self._merge_at = max(self._max_pending, 2 * len(self._pieces))
        self._ready.set()

    def end(self, error: QuireError | None = None) -> None:
        """End the stream; `error` is raised after the last piece has been read."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._ready.set()

    def stop(self, error: QuireError) -> None:
        """Cancel the request and end the stream; the consumer gets the error."""
        if not self.is_over:
            self._cancel(self.request_id)
            self.end(error)

    def close(self) -> None:
        """Discard unread pieces, and cancel the request if it still runs."""
        if not self.is_over:
            self._cancel(self.request_id)
            self.end()
        self._pieces.clear()
        self._num_bytes = 0

    def take(self) -> list[Piece]:
        """Remove and return all unread pieces, merged by answer and part. Without any, return an empty list, or raise
        the error that ended the stream. `is_over` distinguishes the end from a pause.
        """
        if not self._pieces and self._error is not None:
            raise self._error
        # Usually the consumer reads every piece at once, and a single piece needs no merging.
        pieces = merge_pieces(self._pieces) if len(self._pieces) > 1 else list(self._pieces)
        self._pieces.clear()
        self._num_bytes, self._merge_at = 0, self._max_pending
        return pieces

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
    """The stream of a submitted request, and its completion. If the request is refused, reading raises the error. Must
    always be closed."""

    def __init__(self, reply: Reply, cancel: Callable[[str], None], forget: Callable[[str], object]) -> None:
        super().__init__(reply.request.request_id, cancel)
        self.reply = reply
        self._forget = forget

    def show(self, pieces: list[Piece]) -> None:
        if self.reply.refusal is not None:
            self.end(self.reply.refusal)
        elif pieces:
            self.put(pieces)
        elif self.reply.request.reports_progress:
            self._ready.set()
        if self.reply.is_done:
            self.end()

    def completion(self) -> Completion:
        """Return the request with its answers received so far."""
        return self.reply.completion()

    def close(self) -> None:
        """Cancel the request if it still runs, and stop receiving its events."""
        super().close()
        self._forget(self.request_id)
