"""The server that `quire launch` starts for an agent, with bars of its load, and child processes that end with us."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.shared.ending import EXIT_SIGNALS
from quire.cli.shared.found_servers import FoundServer, linked_socket, server_on_socket
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.checkpoints import Progress

POLL_S = 0.2
START_TIMEOUT_S = 600.0
"""Longest time without progress of the load; a download may take longer as a whole."""
END_TIMEOUT_S = 60.0
MAX_LOG_LINES = 20


@contextmanager
def started_server(model: str, folder: Path) -> Iterator[tuple[FoundServer, Path]]:
    """Run a server of this model, which stops when this context ends. Yields its state, once the model is ready, and
    its admin socket."""
    from quire.checkpoints.progress import show_progress

    admin, log = folder / "server" / "admin.sock", folder / "server.log"
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--admin-socket", str(admin)]
    typer.echo(f"starting a server for {model} ...", err=True)
    with log.open("wb") as output:
        child = child_process(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        with child as process:

            def wait(condition: Callable[[FoundServer], bool]) -> FoundServer:
                with show_progress() as progress:
                    return _wait_until(condition, process, admin, log, LoadBars(progress))

            with linked_socket(admin, wait(lambda _: True)):
                yield wait(lambda server: all(model.is_ready for model in server.models)), admin


@dataclass(slots=True)
class LoadBars:
    """Shows a server's progress of its load in this process. Polls may miss the end of one part of the load."""

    show: "Progress"
    shown: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes that are done and all of them, of each part that is shown."""

    def update(self, server: FoundServer) -> bool:
        """Show the progress of all models that are loaded; return whether it has changed."""
        parts = [model.load_progress for model in server.models if model.load_progress is not None]
        now = {label: (done_bytes, total_bytes) for label, done_bytes, total_bytes in parts}
        has_changed = now != self.shown
        for label, (_, total_bytes) in self.shown.items():
            if label not in now:
                self.show(label, total_bytes, total_bytes)
        for label, (done_bytes, total_bytes) in now.items():
            self.show(label, done_bytes, total_bytes)
        self.shown = now
        return has_changed


def _wait_until(
    condition: Callable[[FoundServer], bool],
    process: "subprocess.Popen[bytes]",
    admin: Path,
    log: Path,
    bars: LoadBars,
) -> FoundServer:
    """Wait until the server meets the condition, and return its state. Raises ConfigError with the end of the log."""
    deadline_s = monotonic() + START_TIMEOUT_S
    while monotonic() < deadline_s:
        server = server_on_socket(admin) if admin.exists() else None
        if server is not None and condition(server):
            return server
        if server is not None and bars.update(server):
            deadline_s = monotonic() + START_TIMEOUT_S
        if process.poll() is not None:
            break
        sleep(POLL_S)
    raise ConfigError("the server did not start:\n" + "\n".join(final_lines(log.read_text(errors="replace"))))


def final_lines(log: str) -> list[str]:
    """Return the end of a server's log: from its first error line if there is one, otherwise the last lines."""
    lines = log.rstrip().splitlines()
    (first, *_) = [*(index for index, line in enumerate(lines) if line.startswith("error: ")), 0]
    return lines[first:][-MAX_LOG_LINES:]


@contextmanager
def child_process(command: list[str], **options: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """Spawn a child process and terminate it at the end, even if a signal arrives during the spawn."""
    process = None
    try:
        with _deferred_signals() as received:
            process = subprocess.Popen(command, **options)  # noqa: S603 - quire itself, or the user's agent
        if received:
            raise SystemExit(128 + received[0])
        yield process
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect termination signals in a list, for the caller to handle afterwards."""
    received: list[int] = []
    old_handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in EXIT_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
