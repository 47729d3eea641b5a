"""Accept connections from a listening socket, limited by MAX_CONNECTIONS and by free file descriptors.

asyncio's server accepts every connection: without free descriptors it can only drop connections, and quire could not
open its own files. Here connections above the limit wait in the kernel's backlog, until others are closed or idle ones
are evicted.
"""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from math import inf

from quire.api.http.limits import MAX_CONNECTIONS, RESERVED_DESCRIPTORS, SPARE_DESCRIPTORS

MAX_ACCEPTS = 64
"""Maximum connections accepted per event-loop callback."""
RETRY_S = 0.01
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts connections of one listening socket. `close` and `wait_closed` work like those of `asyncio.Server`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
        make_room: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._make_room = make_room
        """Closes idle connections, if there are any."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        """Connections that are being opened."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._last_descriptor = 0
        """The descriptor that was accepted or probed last."""
        self._resume()

    def close(self) -> None:
        """Stop accepting connections."""
        self._loop.remove_reader(self._listener)
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    async def wait_closed(self) -> None:
        """Wait until all accepted sockets are connected or closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        self._retry_timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            if not self._may_accept():
                self._make_room()
                self._pause()
                return
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._pause()
                    return
                continue  # the client disconnected before it was accepted
            self._last_descriptor = client.fileno()
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, client))
            self._tasks.add(task)
            task.add_done_callback(self._finish_opening)

    def _may_accept(self) -> bool:
        if self._listener.family == socket.AF_UNIX:
            return True  # the operator is always admitted
        return self._num_connections() + len(self._tasks) < max_connections() and self._has_descriptors()

    def _has_descriptors(self) -> bool:
        """Return whether the next descriptor is below the limit. The kernel assigns the lowest free number."""
        highest = max_descriptor()
        if self._last_descriptor < highest:
            return True
        try:
            probe = os.dup(self._listener.fileno())
        except OSError:
            return False
        os.close(probe)
        self._last_descriptor = probe
        return probe < highest

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._retry_timer = self._loop.call_later(RETRY_S, self._resume)

    def _finish_opening(self, task: asyncio.Task[object]) -> None:
        """Forget the task of a connection. Its exception is ignored, because the client may have disconnected."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


# -- file descriptors for connections ----------------------------------------------------------------------------------


def max_connections() -> int:
    """Return MAX_CONNECTIONS, or the limit of open files minus RESERVED_DESCRIPTORS if that is lower. Of a low limit
    of open files, half is reserved."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(limit - RESERVED_DESCRIPTORS, limit // 2))


def max_descriptor() -> float:
    """Return the highest descriptor for connections; SPARE_DESCRIPTORS, or a quarter of a low limit, are above it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit - 1 - min(SPARE_DESCRIPTORS, limit // 4)


def allow_many_connections() -> str | None:
    """Raise the soft limit of open files. Return a warning if the hard limit is too low for MAX_CONNECTIONS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if (count := max_connections()) == MAX_CONNECTIONS:
        return None
    return (
        f"the limit of open files is {hard:,}, which allows {count:,} connections instead of {MAX_CONNECTIONS:,}; "
        f"raise it with: ulimit -n {MAX_CONNECTIONS + RESERVED_DESCRIPTORS}"
    )
