"""One life of a worker, from the parent's side: a process, a socket, a shared status and a leash. Decides nothing.

The socket lies in a folder only we may enter; as soon as the worker has found it the folder is gone. The page has no
name. The leash is a pair of sockets that says nothing: each side sees it close when the other ends. So however either
of the two ends, nothing is left behind.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from quire.errors import ConfigError
from quire.worker import messages
from quire.worker.messages import ToParent, ToWorker
from quire.worker.shared_status import Flight, SharedStatus

COMMAND = (sys.executable, "-m", "quire.worker.process")
FOLDER = "quire-socket-"
MAX_SOCKET_PATH = 100
"""Bytes of a Unix socket's path; systems take a few more."""


class WorkerProcess:
    """A worker that was spawned. It belongs to the thread that spawned it, and dies with that."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        max_names: int,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        with contextlib.ExitStack() as held:
            self._status = SharedStatus.make(max_names)
            held.callback(self._status.close)
            folder = _private_folder(held)
            self._pair = _bound(context, f"ipc://{folder / 'worker'}", held)
            self._leash, other = socket.socketpair()
            held.callback(self._leash.close)
            with other:
                ends = (self._status.descriptor, other.fileno())
                self._process = subprocess.Popen(  # noqa: S603 - our own module, or what a test hands in
                    [*command, str(folder / "worker"), *map(str, ends), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=ends,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            self._held = held.pop_all()
        self.gone = asyncio.Event()
        """Set at the moment the process has ended."""
        self._leash.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._leash, self._on_leash)

    @property
    def pid(self) -> int:
        """For logs, and for those who kill it on purpose."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Say something. It is sent in its turn; a worker that has not connected yet gets it when it has."""
        self._pair.send(messages.encode_message(message))

    async def receive(self) -> ToParent:
        """The next message. Raises MessageError for what is none."""
        return messages.decode_to_parent(await self._pair.recv())

    def flight(self) -> Flight:
        """What it does, or did when it died."""
        return self._status.read()

    def kill(self) -> None:
        """End it at once; `gone` follows."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> int:
        """Kill it if it lives, and give everything back; the exit code."""
        self.kill()
        self._loop.remove_reader(self._leash)
        # A process with gigabytes takes its time to go.
        code = await asyncio.to_thread(self._process.wait)
        self._held.close()
        return code

    def _on_leash(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not self._leash.recv(1):
                self._loop.remove_reader(self._leash)
                self.gone.set()


def _bound(context: zmq.asyncio.Context, address: str, held: contextlib.ExitStack) -> zmq.asyncio.Socket:
    """A socket for one worker, held until the stack is closed."""
    pair = context.socket(zmq.PAIR)
    held.callback(pair.close)
    # What is on its way is bounded by the ledger, not here: a send that could not be made would be lost.
    pair.setsockopt(zmq.SNDHWM, 0)
    pair.setsockopt(zmq.LINGER, 0)
    pair.bind(address)
    return pair


def _private_folder(held: contextlib.ExitStack) -> Path:
    """A new folder that only we may enter, with a path short enough for a socket; ours until the stack is closed."""
    _sweep(Path(tempfile.gettempdir()))
    lock = None
    while lock is None:  # another who sweeps may have been quicker than our lock
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        lock = _lock(folder)
    held.callback(os.close, lock)
    held.callback(shutil.rmtree, folder, ignore_errors=True)
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/worker"):
        raise ConfigError(
            f"the folder for temporary files must have a path of at most {MAX_SOCKET_PATH} bytes for a socket to lie "
            f"in it, {folder.parent} is longer; set TMPDIR to a shorter one"
        )
    return folder


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps the folder ours for as long as it is open; None if it is another's, or gone.

    The kernel lets go of it with its owner, whichever container that ran in: process ids mean nothing to others.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    os.close(descriptor)
    return None


def _sweep(parent: Path) -> None:
    """A parent that is killed between making a folder and spawning the worker that removes it leaves it: the next one
    takes it away.
    """
    for folder in parent.glob(f"{FOLDER}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
