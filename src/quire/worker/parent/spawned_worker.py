"""A process that is going to be a worker: spawned, with a folder for its socket, a shared status and a leash.

The folder is one only we may enter; as soon as the worker has found the socket it is gone. The page has no name. The
leash is a pair of sockets that carries no data: each side sees it close when the other ends. So however either of the
two ends, nothing is left behind.

Imports next to nothing, so that a worker can be on its way, and importing, before its parent has imported the rest.
"""

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
from types import MappingProxyType

from quire.errors import ConfigError
from quire.worker.child.shared_status import SharedStatus

COMMAND = (sys.executable, "-m", "quire.worker.child.process")
FOLDER = "quire-socket-"
MAX_SOCKET_PATH = 100
"""Bytes of a Unix socket's path; systems take a few more."""


class SpawnedWorker:
    """It waits for a parent at `path`. It belongs to the thread that spawned it, and dies with that."""

    def __init__(
        self,
        max_names: int,
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        with contextlib.ExitStack() as held:
            self.status = SharedStatus.make(max_names)
            held.callback(self.status.close)
            self.path = private_folder(held) / "worker"
            """Of the socket that its parent binds."""
            self.leash, other = socket.socketpair()
            held.callback(self.leash.close)
            with other:
                ends = (self.status.descriptor, other.fileno())
                self.process = subprocess.Popen(  # noqa: S603 - our own module, or what a test hands in
                    [*command, str(self.path), *map(str, ends), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=ends,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            self._held = held.pop_all()

    def kill(self) -> None:
        """Kill it at once, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> int:
        """Kill it if it lives, and release its resources; the exit code. A second call does nothing.

        A process with gigabytes takes its time to go: not for an event loop.
        """
        self.kill()
        code = self.process.wait()
        self._held.close()
        return code


def private_folder(held: contextlib.ExitStack) -> Path:
    """A new folder that only we may enter, with a path short enough for a socket; ours until the stack is closed."""
    _sweep(Path(tempfile.gettempdir()))
    lock = None
    while lock is None:  # another process may have swept it before our lock
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

    The kernel releases it with its owner, whichever container that ran in: process ids mean nothing to others.
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
    removes it.
    """
    for folder in parent.glob(f"{FOLDER}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
