"""Accept connections from a listening socket, limited by MAX_CONNECTIONS and by free file descriptors.

asyncio's server accepts all connections: without free descriptors it can only drop them, and quire could not open its
own files. Here further connections wait in the kernel's backlog until others are closed, or until connections that
were idle for long are evicted.
"""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from math import inf

from quire.api.http.limits import MAX_CONNECTIONS, RESERVED_DESCRIPTORS, SPARE_DESCRIPTORS

MOST_AT_ONCE = 64
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
        self._opening: set[asyncio.Task[object]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._highest = 0
        """The latest descriptor that was accepted or probed."""
        self._begin()

    def close(self) -> None:
        """Stop accepting connections."""
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()

    async def wait_closed(self) -> None:
        """Wait until all accepted sockets are connected or closed."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _begin(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if not self._has_place():
                self._make_room()
                self._pause()
                return
            try:
                taken, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._pause()
                    return
                continue  # the client disconnected before it was accepted
            self._highest = taken.fileno()
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, taken))
            self._opening.add(opening)
            opening.add_done_callback(self._is_open)

    def _has_place(self) -> bool:
        if self._listener.family == socket.AF_UNIX:
            return True  # the operator is always admitted
        return self._num_connections() + len(self._opening) < max_connections() and self._has_descriptors()

    def _has_descriptors(self) -> bool:
        """Return whether the next descriptor is below the limit. The kernel assigns the lowest free number."""
        last = last_descriptor()
        if self._highest < last:
            return True
        try:
            probe = os.dup(self._listener.fileno())
        except OSError:
            return False
        os.close(probe)
        self._highest = probe
        return probe < last

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._again = self._loop.call_later(RETRY_S, self._begin)

    def _is_open(self, opening: asyncio.Task[object]) -> None:
        """Finish opening a connection. An exception is ignored, because the client may have disconnected."""
        self._opening.discard(opening)
        if not opening.cancelled():
            opening.exception()


# -- what the system's limit of open files leaves for connections -----------------------------------------------------


def max_connections() -> int:
    """Return the maximum number of connections: MAX_CONNECTIONS, or the limit of open files minus the reserve for the
    server's own files. If that limit is low, half of it is reserved.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(limit - RESERVED_DESCRIPTORS, limit // 2))


def last_descriptor() -> float:
    """Return the highest descriptor of a connection; SPARE_DESCRIPTORS, or a quarter of a low limit, stay above it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit - 1 - min(SPARE_DESCRIPTORS, limit // 4)


def allow_many_connections() -> str | None:
    """Raise the soft limit of open files. Return a warning if the hard limit is too low for MAX_CONNECTIONS."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(most, 2 * MAX_CONNECTIONS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if (count := max_connections()) == MAX_CONNECTIONS:
        return None
    return (
        f"the limit of open files is {most:,}, which allows {count:,} connections instead of {MAX_CONNECTIONS:,}; "
        f"raise it with: ulimit -n {MAX_CONNECTIONS + RESERVED_DESCRIPTORS}"
    )
