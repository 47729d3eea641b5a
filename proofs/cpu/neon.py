"""The kernels for ARM: cross-compiled, tested under an emulator, their integer products compared with ours bit by bit.

`make native-neon` runs this alone. Where compiler or emulator is missing it says so and proves nothing. Nothing here is
timed: an emulator says nothing of speed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import ROOT, say

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
PACKAGES = "g++-aarch64-linux-gnu qemu-user"
CASES_EACH = 50
"""Products of each format."""


@dataclass(frozen=True, slots=True)
class Target:
    """A processor to build for, and how its programs are started."""

    name: str
    settings: tuple[str, ...] = ()
    start: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """What is built for it."""
        return ROOT / "build" / f"native-{self.name}"

    def build(self) -> None:
        """The tests of the kernels, without sanitizers."""
        plain = ("-DQUIRE_NATIVE_TESTS=ON", "-DQUIRE_NATIVE_SANITIZE=OFF")
        _run(["cmake", "-S", str(ROOT / "native"), "-B", str(self.folder), *plain, *self.settings])
        _run(["cmake", "--build", str(self.folder), "--parallel", str(os.cpu_count() or 1)])

    def run(self, program: str, *words: str) -> list[str]:
        """What a program says, line by line."""
        return _run([*self.start, str(self.folder / program), *words]).splitlines()


OWN = Target("own")
ARM = Target(
    "neon",
    ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
    (EMULATOR, "-L", str(LIBRARIES)),
)


def missing() -> str:
    """What is not on this machine, in a sentence; nothing if all is."""
    absent = [one for one in (COMPILER, EMULATOR) if shutil.which(one) is None]
    return f"there is no {' and no '.join(absent)}; install {PACKAGES}" if absent else ""


@dataclass
class Prints:
    """Digests of the same products by several builds."""

    pairs: int = 0
    builds: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def compare(lines: Mapping[str, Sequence[str]]) -> Prints:
    """Every build of every processor against the portable build of this one."""
    found = Prints()
    digests = {
        (f"{processor} {isa}", f"{name} {case}"): digest
        for processor, said in lines.items()
        for isa, name, case, digest in (line.split() for line in said)
    }
    expected = {product: digest for (build, product), digest in digests.items() if build == f"{OWN.name} portable"}
    for (build, product), digest in digests.items():
        found.builds.add(build)
        if build == f"{OWN.name} portable":
            continue
        found.pairs += 1
        if digest != expected.get(product):
            found.wrong.append(f"{build}: {product}")
    return found


def prove(cases_each: int = CASES_EACH) -> Prints:
    """Build both, run the tests under the emulator, and compare."""
    for target in (OWN, ARM):
        target.build()
    for line in ARM.run("test_kernels"):
        say(f"  {ARM.name}: {line}")
    return compare({target.name: target.run("int8_fingerprints", str(cases_each)) for target in (OWN, ARM)})


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        say(done.stdout[-3000:])
        raise RuntimeError(f"{words[0]} ended with {done.returncode}")
    return done.stdout


def main() -> int:
    """Exit code 1 if a bit differs."""
    if reason := missing():
        say(f"skipped: {reason}")
        return 0
    found = prove()
    for line in found.wrong[:10]:
        say(f"not the same bits: {line}")
    say(f"{found.pairs} products of {', '.join(sorted(found.builds))}: {len(found.wrong)} differ")
    return 1 if found.wrong or not found.pairs else 0


if __name__ == "__main__":
    sys.exit(main())
