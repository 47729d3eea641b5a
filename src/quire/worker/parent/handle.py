"""One worker process, from the parent's side: a process that was spawned, and a socket to it. Decides nothing."""

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
    """A worker that was spawned. It belongs to the thread that spawned it, and dies with that."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        max_names: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        spawned: SpawnedWorker | None = None,
    ) -> None:
        """`spawned`: one that was spawned already, with room for as many names; from now on it is ours."""
        self._spawned = spawned or SpawnedWorker(max_names, command, environment)
        try:
            self._pair = _bound(context, f"ipc://{self._spawned.path}")
        except zmq.ZMQError:
            self._spawned.close()
            raise
        self.gone = asyncio.Event()
        """Set at the moment the process has ended."""
        self._spawned.leash.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._spawned.leash, self._on_leash)

    @property
    def pid(self) -> int:
        """For logs, and for tests that kill it."""
        return self._spawned.process.pid

    def send(self, message: ToWorker) -> None:
        """Queue a message; a worker that has not connected yet gets it when it has."""
        self._pair.send(messages.encode_message(message))

    async def receive(self) -> ToParent:
        """The next message. Raises MessageError for malformed ones."""
        return messages.decode_to_parent(await self._pair.recv())

    def flight(self) -> Flight:
        """The worker's status, also after its death."""
        return self._spawned.status.read()

    def kill(self) -> None:
        """Kill it at once; `gone` follows."""
        self._spawned.kill()

    async def close(self) -> int:
        """Kill it if it lives, and release its resources; the exit code."""
        self._loop.remove_reader(self._spawned.leash)
        self._pair.close()
        return await asyncio.to_thread(self._spawned.close)

    def _on_leash(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not self._spawned.leash.recv(1):
                self._loop.remove_reader(self._spawned.leash)
                self.gone.set()


def _bound(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """A socket for one worker."""
    pair = context.socket(zmq.PAIR)
    try:
        # What is on its way is bounded by the ledger, not here: a send that failed would lose its message.
        pair.setsockopt(zmq.SNDHWM, 0)
        pair.setsockopt(zmq.LINGER, 0)
        pair.bind(address)
    except zmq.ZMQError:
        pair.close()
        raise
    return pair
