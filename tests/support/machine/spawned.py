"""A server, a member or another command in a process of its own: what it writes, the moment it is ready, its end.

Whatever starts `quire serve` or its like, in tests, proofs and measurements, starts it here.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
STARTS_S = 600.0
STOPS_S = 20.0
SHOWN_CHARACTERS = 3000
LISTENING = r"listening on http://\S*:(\d+)"
"""What a server writes once it answers."""
MEMBER_AT = r"^member at ([^,;\n]+)"


@dataclass
class Spawned:
    """One that was started. What it writes is in its log."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def text(self) -> str:
        """The whole lines it has written so far."""
        return self.log.read_text(errors="replace").rpartition("\n")[0]

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait_for(self, pattern: str, within_s: float = STARTS_S) -> str:
        """The first group of this pattern in what it writes. Raises RuntimeError if it ends before."""
        until_s = time.monotonic() + within_s
        while True:
            is_last = self.has_ended or time.monotonic() > until_s
            if found := re.search(pattern, self.text, re.MULTILINE):
                return found[1]
            if is_last:
                raise RuntimeError(
                    f"{self.process.args!r} was not ready: {self.log.read_text(errors='replace')[-SHOWN_CHARACTERS:]}"
                )
            time.sleep(0.02)

    def ready_at(self, port: int, within_s: float = STARTS_S) -> float:
        """The moment at which /ready says so. Raises RuntimeError if it ends before."""
        until_s = time.perf_counter() + within_s
        while time.perf_counter() < until_s and not self.has_ended:
            connection = HTTPConnection("127.0.0.1", port, timeout=20.0)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return time.perf_counter()
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.01)
        raise self._not_ready()

    def _not_ready(self) -> RuntimeError:
        written = self.log.read_text(errors="replace")[-SHOWN_CHARACTERS:]
        return RuntimeError(f"{self.process.args!r} did not become ready: {written}")


def spawn(
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path = ROOT,
    is_leader: bool = False,
) -> Spawned:
    """Start it, with our own environment if none is named; the leader of a session is stopped with all of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=is_leader,
        )
    return Spawned(process, log)


@contextmanager
def spawned(
    words: Sequence[str],
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path = ROOT,
    is_leader: bool = False,
    stops_s: float = STOPS_S,
) -> Iterator[Spawned]:
    """For as long as the block runs. Then it has so many seconds to end itself before it is killed."""
    with TemporaryDirectory(prefix="quire-log-") as own:
        one = spawn(words, log or Path(own, "log"), environment, folder=folder, is_leader=is_leader)
        try:
            yield one
        finally:
            stop(one.process, stops_s)


def stop(process: "subprocess.Popen[bytes]", within_s: float = STOPS_S) -> None:
    """Ask it to end, and see that it does: this process, and its session even if it is gone already."""
    if process.poll() is None and within_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    process.kill()
    with suppress(ProcessLookupError):  # it leads none, or none of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def in_checkout(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment in which this checkout comes before all that is installed."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}
