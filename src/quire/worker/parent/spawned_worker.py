"""Spawns a worker process, with a folder for its socket, a shared status, and a leash.

The folder is private to this user, and the worker removes it after connecting. The shared status has no file name. The
leash is a socket pair that carries no data: each process detects its closing when the other ends. Nothing remains after
either process ends, however it ends.

Imports little, so that the worker can start, and import, before its parent has finished importing.
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
    """A process that waits for its parent at `path`. It is killed when the thread that spawned it ends."""

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
            """Path of the socket that the parent binds."""
            self.leash, other = socket.socketpair()
            held.callback(self.leash.close)
            with other:
                ends = (self.status.descriptor, other.fileno())
                self.process = subprocess.Popen(  # noqa: S603 - quire's own module, or a test's command
                    [*command, str(self.path), *map(str, ends), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=ends,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
            self._held = held.pop_all()

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
        self._held.close()
        return code


def private_folder(held: contextlib.ExitStack) -> Path:
    """Create a folder private to this user, with a path short enough for a socket. It is removed with the stack. Raises
    ConfigError if the path is too long."""
    _sweep(Path(tempfile.gettempdir()))
    lock = None
    while lock is None:  # another process may remove the folder before it is locked
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


def _sweep(parent: Path) -> None:
    """Remove folders whose parent was killed before it spawned the worker that would have removed the folder."""
    for folder in parent.glob(f"{FOLDER}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
