"""The parent's handle of one worker process and of the socket to it. It makes no decisions."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import zmq
import zmq.asyncio

from quire.worker import messages
from quire.worker.child.shared_status import WorkerStatus
from quire.worker.messages import ToParent, ToWorker
from quire.worker.parent.spawned_worker import SpawnedWorker


class WorkerProcess:
    """A spawned worker, which is killed when the thread that spawned it ends. Only that thread may use this object."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        max_request_ids: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        spawned: SpawnedWorker | None = None,
    ) -> None:
        """`spawned`: a worker spawned earlier with the same `max_request_ids`; this object takes ownership of it."""
        self._spawned = spawned or SpawnedWorker(max_request_ids, command, environment)
        try:
            self._socket = _bind_socket(context, f"ipc://{self._spawned.path}")
        except zmq.ZMQError:
            self._spawned.close()
            raise
        self.exit_event = asyncio.Event()
        """Set when the process has ended."""
        self._spawned.liveness_socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._spawned.liveness_socket, self._on_liveness_event)

    @property
    def pid(self) -> int:
        """The process id, for logs and for tests that kill the worker."""
        return self._spawned.process.pid

    def send(self, message: ToWorker) -> None:
        """Queue a message; it is delivered once the worker has connected."""
        self._socket.send(messages.encode_message(message))

    async def receive(self) -> ToParent:
        """Return the next message. Raises MessageError if it is malformed."""
        return messages.decode_to_parent(await self._socket.recv())

    def status(self) -> WorkerStatus:
        """Return the worker's status, also after its death."""
        return self._spawned.status.read()

    def kill(self) -> None:
        """Kill the worker; `exit_event` is set when it has ended."""
        self._spawned.kill()

    async def close(self) -> int:
        """Kill the worker if it is alive, and release its resources; return its exit code."""
        self._loop.remove_reader(self._spawned.liveness_socket)
        self._socket.close()
        return await asyncio.to_thread(self._spawned.close)

    def _on_liveness_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not self._spawned.liveness_socket.recv(1):
                self._loop.remove_reader(self._spawned.liveness_socket)
                self.exit_event.set()


def _bind_socket(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """Bind a socket for one worker."""
    socket = context.socket(zmq.PAIR)
    try:
        # Unlimited: the ledger bounds unsent messages, and a send that failed here would lose its message.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
