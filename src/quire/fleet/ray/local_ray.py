"""Ray on this machine alone, for one fleet: loopback addresses, its token required, ended by its starter.

Imports no ray: it is a process of its own, which this one starts and keeps a record of.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

from quire.config.home import expanded
from quire.config.machine import memory_limit_bytes
from quire.errors import ConfigError
from quire.fleet.ray.serve_rest import AUTH_MODE, RayUnreachableError, ServeRest, made_token

LOOPBACK = "127.0.0.1"
START_S = 180.0
"""Ray is a dozen processes, and takes its time on a small machine."""
END_S = 60.0
POLL_S = 0.5
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
OBJECT_STORE_BYTES = 128 << 20
"""Nothing of ours goes through it."""
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_worker_niceness": "0"}
"""A proxy that is not ready within 5 s is killed and started anew: a busy machine needs longer. Ray's workers, and so
members, would yield to everything else on the machine."""
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Despite its name it makes Ray keep a machine's loopback address: else 127.0.0.1 is replaced by another."""


def check_installed() -> None:
    """Raises ConfigError where ray is not there."""
    if find_spec("ray") is None:
        raise ConfigError("Ray Serve is not installed; install the extra quire[ray]")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the record of what runs, and of generated keys."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expanded(base, "set XDG_STATE_HOME to a full path") / "quire" / "ray"


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray that was started here."""

    pid: int
    address: str
    """Of its dashboard."""
    gcs: str
    """Where drivers connect to."""

    @property
    def is_alive(self) -> bool:
        """Whether its process is still that of Ray."""
        try:
            words = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:
            return _answers(self.pid) if not Path("/proc").is_dir() else False
        return b"ray.scripts.scripts" in words


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def remembered(folder: Path) -> LocalRay | None:
    """The Ray that was started here and still runs."""
    try:
        saved = json.loads((folder / "head.json").read_text(encoding="utf-8"))
        found = LocalRay(int(saved["pid"]), str(saved["address"]), str(saved["gcs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.is_alive else None


def ray_command(address: str, gcs: str) -> list[str]:
    """The command of Ray's head with its dashboard, on loopback alone."""
    dashboard = urlsplit(address)
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        f"--node-ip-address={LOOPBACK}",
        f"--port={gcs.rpartition(':')[2]}",
        "--include-dashboard=true",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={dashboard.port or 8265}",
        f"--memory={memory_limit_bytes()}",  # all of it: members reserve what they need
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]


def free_address() -> str:
    """One that is free at this moment."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return f"{LOOPBACK}:{listener.getsockname()[1]}"


def start_ray(folder: Path, address: str, environ: Mapping[str, str]) -> LocalRay:
    """Start it, and wait until it responds. Raises ConfigError."""
    check_installed()
    gcs = free_address()
    if urlsplit(address).hostname not in (LOOPBACK, "localhost", "::1"):
        raise ConfigError(f"Ray is started on this machine alone, {address} given; start that cluster yourself")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token, log = made_token(environ), folder / "head.log"
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - our own command
            ray_command(address, gcs),
            env={**PATIENT, **environ, **ALONE, AUTH_MODE: "token"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ray = LocalRay(process.pid, address, gcs)
    (folder / "head.json").write_text(json.dumps(asdict(ray)), encoding="utf-8")
    until_s = monotonic() + START_S
    while True:
        try:
            ServeRest(address, token).details()
            process.returncode = 0  # it outlives this process: no warning that it still runs
            return ray
        except RayUnreachableError as error:
            if process.poll() is not None or monotonic() > until_s:
                end_ray(folder, ray)
                raise ConfigError(f"Ray did not start within {START_S:g} s; see {log}") from error
        sleep(POLL_S)


def end_ray(folder: Path, ray: LocalRay) -> None:
    """End it, with all processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = monotonic() + END_S
        if ray.is_alive:
            os.kill(ray.pid, number)
        while ray.is_alive and monotonic() < until_s:
            sleep(POLL_S)
            _reap(ray.pid)
    (folder / "head.json").unlink(missing_ok=True)


def _reap(pid: int) -> None:
    """If it is a child of ours, it is only gone when it was waited for."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
