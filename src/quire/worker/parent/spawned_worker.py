"""Spawns a worker process, with a folder for its socket, a shared status, and a liveness socket.

The folder is private to this user, and the worker removes it after connecting. The shared status has no file name. The
liveness socket is one end of a socket pair without data: it closes when the process at the other end exits. No files
remain after either process exits, even if it crashes.

This module imports little, so that the worker can start, and import, before its parent has finished importing.
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
"""Length limit of a Unix socket's path, in bytes; systems allow slightly more."""


class SpawnedWorker:
    """A process that connects to its parent at `path`. It is killed when the thread that spawned it ends."""

    def __init__(
        self,
        max_request_ids: int,
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        with contextlib.ExitStack() as resources:
            self.status = SharedStatus.create(max_request_ids)
            resources.callback(self.status.close)
            self.path = private_folder(resources) / "worker"
            """Path of the socket that the parent binds."""
            self.liveness_socket, worker_end = socket.socketpair()
            resources.callback(self.liveness_socket.close)
            with worker_end:
                descriptors = (self.status.descriptor, worker_end.fileno())
                self.process = subprocess.Popen(  # noqa: S603 - quire's own module, or a test's command
                    [*command, str(self.path), *map(str, descriptors), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            self._resources = resources.pop_all()

    def kill(self) -> None:
        """Kill the process if it is alive."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> int:
        """Kill the process if it is alive and release its resources; return its exit code. May be called again.

        Blocks: a process with gigabytes of memory takes long to end. Do not call it on an event loop.
        """
        self.kill()
        code = self.process.wait()
        self._resources.close()
        return code


def private_folder(stack: contextlib.ExitStack) -> Path:
    """Create a folder private to this user, with a path short enough for a socket. Closing the stack removes it. Raises
    ConfigError if the path is too long."""
    _sweep(Path(tempfile.gettempdir()))
    lock = None
    while lock is None:  # another process may remove the folder before it is locked
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        lock = _lock(folder)
    stack.callback(os.close, lock)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/worker"):
        raise ConfigError(
            f"expected a socket path of at most {MAX_SOCKET_PATH} bytes, got a longer one in the temporary folder "
            f"{folder.parent}; set TMPDIR to a shorter path"
        )
    return folder


def _lock(folder: Path) -> int | None:
    """Lock the folder and return the descriptor that holds the lock; None if another process has locked or removed it.

    The kernel releases the lock when its owner ends, also across containers, where process ids are ambiguous.
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


def _sweep(temp_folder: Path) -> None:
    """Remove folders of parents that were killed before they spawned the worker that would have removed the folder."""
    for folder in temp_folder.glob(f"{FOLDER}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
