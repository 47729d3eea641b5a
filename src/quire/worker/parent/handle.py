"""The parent's handle of one worker process and the socket to it. Decides nothing."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import zmq
import zmq.asyncio

from quire.worker import messages
from quire.worker.child.shared_status import Flight
from quire.worker.messages import ToParent, ToWorker
from quire.worker.parent.spawned_worker import SpawnedWorker


class WorkerProcess:
    """A spawned worker. It belongs to the thread that spawned it, and is killed when that thread ends."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        max_names: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        spawned: SpawnedWorker | None = None,
    ) -> None:
        """`spawned`: a worker that was spawned earlier with the same `max_names`; this object takes ownership of it."""
        self._spawned = spawned or SpawnedWorker(max_names, command, environment)
        try:
            self._pair = _bound(context, f"ipc://{self._spawned.path}")
        except zmq.ZMQError:
            self._spawned.close()
            raise
        self.gone = asyncio.Event()
        """Set when the process has ended."""
        self._spawned.leash.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._spawned.leash, self._on_leash)

    @property
    def pid(self) -> int:
        """The process id, for logs and for tests that kill the worker."""
        return self._spawned.process.pid

    def send(self, message: ToWorker) -> None:
        """Queue a message; it is delivered once the worker has connected."""
        self._pair.send(messages.encode_message(message))

    async def receive(self) -> ToParent:
        """Return the next message. Raises MessageError if it is malformed."""
        return messages.decode_to_parent(await self._pair.recv())

    def flight(self) -> Flight:
        """Return the worker's status, also after its death."""
        return self._spawned.status.read()

    def kill(self) -> None:
        """Kill the worker; `gone` is set when it has ended."""
        self._spawned.kill()

    async def close(self) -> int:
        """Kill the worker if it is alive, and release its resources; return its exit code."""
        self._loop.remove_reader(self._spawned.leash)
        self._pair.close()
        return await asyncio.to_thread(self._spawned.close)

    def _on_leash(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not self._spawned.leash.recv(1):
                self._loop.remove_reader(self._spawned.leash)
                self.gone.set()


def _bound(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """Bind a socket for one worker."""
    pair = context.socket(zmq.PAIR)
    try:
        # Unlimited: the ledger bounds unsent messages, and a send that failed here would lose its message.
        pair.setsockopt(zmq.SNDHWM, 0)
        pair.setsockopt(zmq.LINGER, 0)
        pair.bind(address)
    except zmq.ZMQError:
        pair.close()
        raise
    return pair
