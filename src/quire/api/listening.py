"""Open the listening sockets: the public TCP socket, and the operator's Unix socket.

The sockets are opened first at startup, so that an address in use fails immediately. So this module has few imports.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from quire.config.server_settings import ServerSettings
from quire.errors import ConfigError

BACKLOG = 2048


def public_socket(settings: ServerSettings, *, allow_no_keys: bool) -> socket.socket:
    """Open the socket for clients. Raises ConfigError if the settings do not allow it or the address is in use."""
    if not (settings.is_loopback or allow_no_keys):
        from quire.api.access.keys import KeyRing  # noqa: PLC0415 - rarely needed, slow to import

        settings.check_access_control(has_keys=KeyRing(settings.keys_path()).is_locked, allow_no_keys=False)
    return listen(settings.host, settings.port)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. Raises ConfigError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit TCP_NODELAY. Without it, a body sent after its headers could be delayed by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        raise ConfigError(message, ("port",)) from error
    listener.setblocking(False)
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Open a Unix socket that only its owner can access: mode 0600 in a folder of mode 0700. Raises ConfigError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"expected an admin socket folder that only its owner can open, got {path.parent} with mode {mode:04o}; "
            "choose another with --admin-socket",
            code="folder_not_private",
        )
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot create the admin socket {path}: {error.strerror}; change --admin-socket") from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def listening_unix(path: Path) -> Iterator[socket.socket]:
    """Open a Unix socket as a context; its file is removed at the end, unless another server has replaced it."""
    with listen_unix(path) as listener:
        status = path.stat()
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), status):
                    path.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket file on which no server listens. Raises ConfigError if another server listens on it."""
    if not path.is_socket():
        if path.is_symlink() and not path.exists():  # left by a `quire launch` that was killed
            path.unlink()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # the backlog is full: a server listens
    message = f"another server listens on the admin socket {path}; choose another with --admin-socket"
    raise ConfigError(message, code="socket_in_use")
