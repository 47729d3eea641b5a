"""`quire doctor` on machines that were made up: faults that are really there, and names that must not be told.

Each run is a process in a file system, and where need be under a host name, of its own: files of the system are covered
by others, so that the doctor reads what a machine like that would say.
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
    """Something wrong that the doctor has a name for."""

    name: str
    plant: str
    """Shell commands in a file system of the process's own, before it is run. {work} is a folder."""
    variables: tuple[tuple[str, str], ...] = ()
    before: str = ""
    """What the command is run by."""


def _covered(path: str, text: str) -> str:
    return f"printf {shlex.quote(text)} > {{work}}/covered && mount --bind {{work}}/covered {path}"


def _meminfo(**changed: int) -> str:
    """The system's own with some lines changed."""
    edits = " ".join(f"-e 's/^{name}:.*/{name}: {value} kB/'" for name, value in changed.items())
    return f"sed {edits} /proc/meminfo > {{work}}/covered && mount --bind {{work}}/covered /proc/meminfo"


CPU = "/sys/devices/system/cpu/cpu0"
CGROUP = (
    "mount -t tmpfs tmpfs /sys/fs/cgroup && printf {text} > /sys/fs/cgroup/{name} && "
    "echo 0::/ > {{work}}/own && mount --bind {{work}}/own /proc/$$/cgroup && "
    "echo '31 22 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw' > {{work}}/mounts && "
    "mount --bind {{work}}/mounts /proc/$$/mountinfo"
)
"""The process stays the same when it becomes the doctor."""
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
    Fault("fewer-cpus", "true", before="taskset -c 0"),
    Fault("huge-pages", _covered("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")),
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
    """Each planted, and looked for by its name; none of them is there without."""
    native = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=True).stdout.strip()
    sound = _told(_run(proof.folder / "sound", Fault("", "true"), free_port(), native))
    missed = []
    with _listening() as taken:
        told = _told(_run(proof.folder / "port", Fault("port-taken", "true"), taken, native))
        missed += [] if "port-taken" in told else ["port-taken"]
    for one in FAULTS:
        told = _told(_run(proof.folder / one.name, one, free_port(), native))
        if one.name not in told or one.name in sound:
            missed.append(one.name)
            say(f"    {one.name}: it said {told}; without it {sound}")
    proof.at_least("doctor_faults", len(FAULTS) + 1, 12, "that were planted")
    proof.equals("doctor_wrong", len(missed), 0, "that it did not name, or named without them")


@section("doctor: what is pasted")
def pasted(proof: Proof) -> None:
    """Names, paths and keys of made-up people, looked for in the block that is pasted into a report."""
    count, leaked = proof.sized(quick=6, full=50), 0
    for at in range(count):
        secrets = Secrets.drawn(Random(proof.random.getrandbits(64)))
        block = _block(_run_as(proof.folder / f"somebody-{at}", secrets))
        found = [one for one in secrets.all if one.lower() in block.lower()]
        leaked += bool(found) or not block
        for one in found:
            say(f"    it told {one!r}")
    proof.at_least("doctor_environments", count, proof.sized(quick=6, full=50))
    proof.equals("doctor_leaks", leaked, 0, "blocks with a user's name, a path, a key or a host's name")


# -- runs --------------------------------------------------------------------------------------------------------------


def _run(work: Path, fault: Fault, port: int, native: str) -> str:
    work.mkdir(parents=True)
    plant = fault.plant.format(work=work, native=native)
    variables = {name: value.format(work=work) for name, value in fault.variables}
    command = f"{plant} && exec {fault.before} {sys.executable} -m quire doctor --port {port}"
    return _output(["unshare", "--mount", "bash", "-c", command], variables, work)


def _output(words: list[str], variables: dict[str, str], work: Path) -> str:
    around = {**plain_environment(), "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(work), **variables}
    done = subprocess.run(words, env=around, cwd=work, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the doctor ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def _block(output: str) -> str:
    return output.partition("for a report:")[2]


def _told(output: str) -> list[str]:
    """The names of what it found, as its block has them."""
    line = next(line for line in _block(output).splitlines() if line.strip().startswith("doctor:"))
    return [name.strip() for name in line.partition(":")[2].split(",")]


@contextmanager
def _listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Secrets:
    """What belongs to somebody."""

    user: str
    host: str
    token: str
    folder: str

    @classmethod
    def drawn(cls, random: Random) -> "Secrets":
        """Long enough that nobody says them by chance."""

        def word(letters: str = ascii_lowercase, length: int = 10) -> str:
            return "".join(random.choices(letters, k=length))

        return cls(word(), f"{word()}-{word(length=5)}", f"hf_{word(hexdigits, 30)}", word())

    @property
    def all(self) -> list[str]:
        """Each of them, and paths as such."""
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
