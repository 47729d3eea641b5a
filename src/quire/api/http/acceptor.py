"""Takes connections off a listening socket, as many as there are places and descriptors for.

The event loop's own server takes all that come: out of descriptors it can only cut them, and the server's own files
cannot be opened any more. Here the rest wait in the system's queue, as a client of a busy server expects, until others
are done or those that have waited long without a request have made room.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from quire.api.http.descriptors import last_descriptor, max_connections

MOST_AT_ONCE = 64
"""Accepted in one turn of the loop."""
RETRY_S = 0.01
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Of one listening socket, as long as it is open; `close` and `wait_closed` are those of the loop's own server."""

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
        """Cuts some that hold a connection for nothing, if there are any."""
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._highest = 0
        """The number of the descriptor that came last."""
        self._begin()

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()

    async def wait_closed(self) -> None:
        """What was taken is a connection by now, or gone."""
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
                continue  # this one left before it was taken
            self._highest = taken.fileno()
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, taken))
            self._opening.add(opening)
            opening.add_done_callback(self._is_open)

    def _has_place(self) -> bool:
        if self._listener.family == socket.AF_UNIX:
            return True  # the operator is always admitted
        return self._num_connections() + len(self._opening) < max_connections() and self._has_descriptors()

    def _has_descriptors(self) -> bool:
        """A new descriptor gets the lowest number that is free, so below it all are taken."""
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
        """Open, or closed by its client meanwhile, which is no failure of the server."""
        self._opening.discard(opening)
        if not opening.cancelled():
            opening.exception()
