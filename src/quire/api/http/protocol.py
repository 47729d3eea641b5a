"""uvicorn's HTTP/1.1 protocol with additional limits.

Added: limits on the size and duration of a request's head (request line and headers), on the number of connections and
of pipelined requests, on idle time, and on the time for which a client reads nothing of a response; a way to abort a
connection immediately; and cancelling a running request if its client pipelined another one and then disconnected.

When all connections are in use, those idle for the longest are closed, so that a client with many idle connections
does not block others. The error for invalid HTTP is sent after the responses to earlier requests.
"""

import asyncio
import heapq
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.api.http.errors import ApiError, ErrorFormat
from quire.api.http.limits import (
    CHECK_S,
    HEAD_S,
    KEEP_ALIVE_S,
    LINGER_S,
    MAX_EVICTIONS,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MIN_IDLE_S,
    STUCK_S,
    WRITE_BUFFER_BYTES,
)


class HeadTooLargeError(Exception):
    """The head of a request has more than MAX_HEAD_BYTES."""


class Protocol(HttpToolsProtocol):
    """The protocol of one connection."""

    error_format: ClassVar[ErrorFormat]
    """Format of the error for invalid HTTP, which has no path and so belongs to no API; set by a subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        """Bytes of an incomplete head, counted per read. A read in which a request ends is not counted: it is at most
        as large as a few heads, and a complete head is checked by itself."""
        self._num_headers = 0
        """Number of headers before the body that is being received; more headers than these are trailers."""
        self._is_in_head, self._is_in_body = True, False
        self._has_ended_in_read = False
        """Whether the current read contains the end of a request, so that not all its bytes are head bytes."""
        self._is_head_too_large = False
        self._is_refused = False
        """Whether the client sent invalid HTTP: later data is discarded, the error is sent after earlier responses."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []
        self._idle_since_s = self._stuck_since_s = self.loop.time()
        self._num_unsent = 0
        self._check_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._head_timer = self.loop.call_later(HEAD_S, self._close_late_head)
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all requests of the connection; uvicorn cancels only the last one."""
        self._stop_head_timer()
        for timer in (self._check_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_ended_in_read = False
        is_after_body = self._is_in_body and len(self.headers) > self._num_headers
        super().data_received(data)
        # Still in a head or in trailers, and no request ended in this read: all its bytes are header bytes.
        if (self._is_in_head or is_after_body) and not self._has_ended_in_read and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._is_head_too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin to limit the size and duration of a request's head."""
        super().on_message_begin()
        self._num_head_bytes, self._is_in_head = 0, True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._close_late_head)

    def on_headers_complete(self) -> None:
        """Serve the request, or queue it behind the previous one. Raises HeadTooLargeError."""
        num_bytes = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if num_bytes > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            raise HeadTooLargeError
        self._is_in_head, self._is_in_body = False, True
        self._num_head_bytes, self._num_headers = 0, len(self.headers)
        self._stop_head_timer()
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
        elif self.pipeline:
            # uvicorn stops reading while a pipelined request waits, so it would not notice a disconnect.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Record the end of a request."""
        self._is_in_body, self._has_ended_in_read = False, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or send the error for invalid HTTP after the last response."""
        super().on_response_complete()
        if self._is_refused and not self._is_busy:
            self._refuse()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP in quire's error format, after the pending responses.

        For an invalid body the error is sent immediately, because its request gets no response.
        """
        self._is_refused = True
        self._stop_head_timer()
        if self._is_in_body or not self._is_busy:
            self._refuse()

    @property
    def _is_busy(self) -> bool:
        """Whether a request of this connection is being served or waits."""
        return any(not cycle.response_complete for cycle in self._cycles)

    @property
    def _is_idle(self) -> bool:
        """Whether the connection has had no request and no unsent data for MIN_IDLE_S."""
        if self._is_busy or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.loop.time() - self._idle_since_s >= MIN_IDLE_S

    @classmethod
    def make_room(cls, connections: Iterable[object]) -> None:
        """Abort the connections that have been idle for the longest, if any are idle."""
        idle = [protocol for protocol in connections if isinstance(protocol, cls) and protocol._is_idle]
        count = min(MAX_EVICTIONS, 1 + len(idle) // 16)
        for protocol in heapq.nsmallest(count, idle, key=lambda protocol: protocol._idle_since_s):
            protocol.transport.abort()

    def _refuse(self) -> None:
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        refusal = ApiError(400, "invalid_http", "expected a valid HTTP/1.1 request")
        if self._is_head_too_large:
            message = f"expected at most {MAX_HEAD_BYTES:,} bytes as request head, got more"
            refusal = ApiError(431, "head_too_large", message)
        phrase = HTTPStatus(refusal.status).phrase.encode()
        lines = [b"HTTP/1.1 %d %s\r\n" % (refusal.status, phrase), b"connection: close\r\n"]
        headers, body = self.error_format.answer(refusal)
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _check(self) -> None:
        """Abort a connection that has been idle for KEEP_ALIVE_S, or whose client read nothing for STUCK_S."""
        now_s, num_unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if num_unsent or self._is_busy:
            self._idle_since_s = now_s
        if not num_unsent or num_unsent < self._num_unsent:
            self._stuck_since_s = now_s
        self._num_unsent = num_unsent
        if now_s - self._stuck_since_s > STUCK_S:
            self._record_slow_readers()
            self.transport.abort()
            return
        if now_s - self._idle_since_s > KEEP_ALIVE_S:
            self.transport.abort()
            return
        self._check_timer = self.loop.call_later(CHECK_S, self._check)

    def _record_slow_readers(self) -> None:
        """Record that the client did not read its responses, so that the log reports that and not a disconnect."""
        for cycle in self._cycles:
            record: Any = cycle.scope.get("quire.record")
            if record is not None and not cycle.response_complete:
                record.error = "reader_too_slow"

    def _close_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
