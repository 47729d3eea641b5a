"""`quire doctor` on simulated machines: it must name injected faults, and its report must not contain private data.

Each run is a process in its own mount namespace, some with their own host name: system files are covered by bind
mounts, so that the doctor reads the files of such a machine.
"""

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase, hexdigits

from benchmarks.record import ROOT, say
from benchmarks.servers import free_port, plain_environment
from proofs.framework.proof import Proof, section

NATIVE = "import quire._native as n; print(n.__file__)"


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem of the machine that the doctor reports by this name."""

    name: str
    plant: str
    """Shell commands that cause it, run in the mount namespace before the doctor. {work} is a folder."""
    variables: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    """A command prefix that runs the doctor."""


def _cover_file(path: str, text: str) -> str:
    return f"printf {shlex.quote(text)} > {{work}}/covered && mount --bind {{work}}/covered {path}"


def _meminfo(**values: int) -> str:
    """Return commands that cover /proc/meminfo by a copy with some changed lines."""
    edits = " ".join(f"-e 's/^{name}:.*/{name}: {value} kB/'" for name, value in values.items())
    return f"sed {edits} /proc/meminfo > {{work}}/covered && mount --bind {{work}}/covered /proc/meminfo"


CPU = "/sys/devices/system/cpu/cpu0"
CGROUP = (
    "mount -t tmpfs tmpfs /sys/fs/cgroup && printf {text} > /sys/fs/cgroup/{name} && "
    "echo 0::/ > {{work}}/own && mount --bind {{work}}/own /proc/$$/cgroup && "
    "echo '31 22 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw' > {{work}}/mounts && "
    "mount --bind {{work}}/mounts /proc/$$/mountinfo"
)
"""`$$` is the shell, whose process id the doctor keeps, because `exec` starts it."""
FAULTS = (
    Fault("keys-readable", "printf '{{}}' > {work}/keys.json && chmod 644 {work}/keys.json",
          (("QUIRE_KEYS_FILE", "{work}/keys.json"),)),
    Fault("cache-folder", "mkdir -p {work}/ro && mount -t tmpfs -o ro tmpfs {work}/ro",
          (("QUIRE_CACHE", "{work}/ro"),)),
    Fault("little-disk", "mkdir -p {work}/small && mount -t tmpfs -o size=100m tmpfs {work}/small",
          (("QUIRE_CACHE", "{work}/small"),)),
    Fault("temporary-folder", "mkdir -p {work}/" + "x" * 90, (("TMPDIR", "{work}/" + "x" * 90),)),
    Fault("open-files", "ulimit -Sn 1000 && ulimit -Hn 1000"),
    Fault("few-threads", "true", (("OMP_NUM_THREADS", "1"),)),
    Fault("fewer-cpus", "true", prefix="taskset -c 0"),
    Fault("huge-pages", _cover_file("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")),
    Fault("powersave", f"mount -t tmpfs tmpfs {CPU} && mkdir {CPU}/cpufreq "
          f"&& echo powersave > {CPU}/cpufreq/scaling_governor"),
    Fault("swapping", _meminfo(SwapTotal=8_000_000, SwapFree=1_000_000)),
    Fault("little-memory", _meminfo(MemAvailable=400_000)),
    Fault("container-memory", CGROUP.format(text="2000000000", name="memory.max")),
    Fault("container-cpus", CGROUP.format(text="'50000 100000'", name="cpu.max")),
    Fault("no-kernels", "mount --bind /dev/null {native}"),
)  # fmt: skip


@section("doctor: faults")
def faults(proof: Proof) -> None:
    """Inject each fault: the doctor must name it, and must not name it without the fault."""
    native = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=True).stdout.strip()
    sound = _problems(_run(proof.folder / "sound", Fault("", "true"), free_port(), native))
    wrong = []
    with _occupied_port() as port:
        problems = _problems(_run(proof.folder / "port", Fault("port-taken", "true"), port, native))
        wrong += [] if "port-taken" in problems else ["port-taken"]
    for fault in FAULTS:
        problems = _problems(_run(proof.folder / fault.name, fault, free_port(), native))
        if fault.name not in problems or fault.name in sound:
            wrong.append(fault.name)
            say(f"    {fault.name}: reported {problems}; without the fault {sound}")
    proof.at_least("doctor_faults", len(FAULTS) + 1, 12, "injected faults")
    proof.equals("doctor_wrong", len(wrong), 0, "faults not named, or named without being injected")


@section("doctor: what is pasted")
def pasted(proof: Proof) -> None:
    """Search the block for bug reports for random user names, host names, paths and keys of the environment."""
    count, num_leaks = proof.sized(quick=6, full=50), 0
    for number in range(count):
        secrets = Secrets.random(Random(proof.random.getrandbits(64)))
        block = _report_block(_run_as(proof.folder / f"somebody-{number}", secrets))
        leaks = [secret for secret in secrets.all if secret.lower() in block.lower()]
        num_leaks += bool(leaks) or not block
        for secret in leaks:
            say(f"    the block contains {secret!r}")
    proof.at_least("doctor_environments", count, proof.sized(quick=6, full=50))
    proof.equals("doctor_leaks", num_leaks, 0, "blocks with a user name, a path, a key or a host name")


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(work: Path, fault: Fault, port: int, native: str) -> str:
    work.mkdir(parents=True)
    plant = fault.plant.format(work=work, native=native)
    variables = {name: value.format(work=work) for name, value in fault.variables}
    command = f"{plant} && exec {fault.prefix} {sys.executable} -m quire doctor --port {port}"
    return _output(["unshare", "--mount", "bash", "-c", command], variables, work)


def _output(command: list[str], variables: dict[str, str], work: Path) -> str:
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(work), **variables}
    process = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"expected exit code 0 or 1, got {process.returncode}: {process.stderr[-1000:]}")
    return process.stdout


def _report_block(output: str) -> str:
    return output.partition("for a report:")[2]


def _problems(output: str) -> list[str]:
    """Return the names of the problems in the block of the output."""
    line = next(line for line in _report_block(output).splitlines() if line.strip().startswith("doctor:"))
    return [name.strip() for name in line.partition(":")[2].split(",")]


@contextmanager
def _occupied_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Secrets:
    """Random private data of a user."""

    user: str
    host: str
    token: str
    folder: str

    @classmethod
    def random(cls, random: Random) -> "Secrets":
        """Draw data that is long enough not to occur by chance."""

        def word(letters: str = ascii_lowercase, length: int = 10) -> str:
            return "".join(random.choices(letters, k=length))

        return cls(word(), f"{word()}-{word(length=5)}", f"hf_{word(hexdigits, 30)}", word())

    @property
    def all(self) -> list[str]:
        """All private data, and the beginnings of paths."""
        return [self.user, self.host, self.host.partition("-")[0], self.token, self.folder, "/home", "/tmp"]  # noqa: S108


def _run_as(work: Path, secrets: Secrets) -> str:
    home = work / "home" / secrets.user
    (home / secrets.folder).mkdir(parents=True)
    variables = {
        "HOME": str(home), "USER": secrets.user, "LOGNAME": secrets.user, "HOSTNAME": secrets.host,
        "HF_TOKEN": secrets.token, "HF_HOME": str(home / secrets.folder), "QUIRE_CACHE": str(home / secrets.folder),
        "OMP_NUM_THREADS": secrets.token, "QUIRE_KEYS_FILE": str(home / f"{secrets.folder}.json"),
    }  # fmt: skip
    name = shlex.quote(secrets.host)
    command = f"hostname {name}; cd {home} && exec {sys.executable} -m quire doctor --port {free_port()}"
    return _output(["unshare", "--mount", "--uts", "bash", "-c", command], variables, work)
