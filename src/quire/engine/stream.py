"""One bounded stream per request, on the event loop's side. Whoever stops reading stops being served.

A stream holds at most `max_pending` pieces that nobody has read. One more, and the consumer counts as stuck: the
request is cancelled, and the consumer, should it come back, reads what was kept and then a `StreamStuckError`. A
consumer that goes away (`aclose`, a cancelled task, an abandoned generator) cancels its request too.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.engine.answers import Piece
from quire.errors import QuireError, StreamStuckError

MAX_PENDING = 4096


class Stream:
    """Pieces of one request in their order, then the end. Used from the event loop only."""

    def __init__(self, request_id: str, cancel: Callable[[str], None], max_pending: int = MAX_PENDING) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._max_pending = max_pending
        self._pieces: deque[Piece] = deque()
        self._is_over = False
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more will be put in."""
        return self._is_over

    def put(self, pieces: list[Piece]) -> None:
        """Add what a step brought; too much of it unread ends the stream."""
        if self._is_over:
            return
        if len(self._pieces) + len(pieces) > self._max_pending:
            self._cancel(self.request_id)
            self.end(StreamStuckError(self.request_id, self._max_pending))
            return
        self._pieces.extend(pieces)
        self._ready.set()

    def end(self, error: QuireError | None = None) -> None:
        """No more pieces; an error is raised after the last one is read."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._ready.set()

    def close(self) -> None:
        """The consumer is gone."""
        if not self._is_over:
            self._cancel(self.request_id)
            self.end()
        self._pieces.clear()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._is_over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._pieces.popleft()
