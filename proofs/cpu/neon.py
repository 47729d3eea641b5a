"""Cross-compiles the ARM kernels, tests them under an emulator, and compares their integer products with ours.

`make native-neon` runs this module alone. Without the compiler or the emulator it prints what is missing, and skips the
comparison. Nothing is timed, because times under an emulator mean nothing.
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
"""The number of products of each format."""


@dataclass(frozen=True, slots=True)
class Target:
    """A processor to build for, and the command that starts its programs."""

    name: str
    settings: tuple[str, ...] = ()
    start: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The build folder."""
        return ROOT / "build" / f"native-{self.name}"

    def build(self) -> None:
        """Build the tests of the kernels, without sanitizers."""
        plain = ("-DQUIRE_NATIVE_TESTS=ON", "-DQUIRE_NATIVE_SANITIZE=OFF")
        _run(["cmake", "-S", str(ROOT / "native"), "-B", str(self.folder), *plain, *self.settings])
        _run(["cmake", "--build", str(self.folder), "--parallel", str(os.cpu_count() or 1)])

    def run(self, program: str, *words: str) -> list[str]:
        """Run a program, and return the lines of its output."""
        return _run([*self.start, str(self.folder / program), *words]).splitlines()


OWN = Target("own")
ARM = Target(
    "neon",
    ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
    (EMULATOR, "-L", str(LIBRARIES)),
)


def missing() -> str:
    """Return a message about missing programs; empty if none is missing."""
    absent = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
    return f"missing {' and '.join(absent)}; install {PACKAGES}" if absent else ""


@dataclass
class Prints:
    """The result of comparing digests of the same products by several builds."""

    pairs: int = 0
    builds: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def compare(lines: Mapping[str, Sequence[str]]) -> Prints:
    """Compare every build of every processor with the portable build of this one."""
    result = Prints()
    digests = {
        (f"{processor} {isa}", f"{name} {case}"): digest
        for processor, output in lines.items()
        for isa, name, case, digest in (line.split() for line in output)
    }
    expected = {product: digest for (build, product), digest in digests.items() if build == f"{OWN.name} portable"}
    for (build, product), digest in digests.items():
        result.builds.add(build)
        if build == f"{OWN.name} portable":
            continue
        result.pairs += 1
        if digest != expected.get(product):
            result.wrong.append(f"{build}: {product}")
    return result


def prove(cases_each: int = CASES_EACH) -> Prints:
    """Build both, run the tests under the emulator, and compare."""
    for target in (OWN, ARM):
        target.build()
    for line in ARM.run("test_kernels"):
        say(f"  {ARM.name}: {line}")
    return compare({target.name: target.run("int8_fingerprints", str(cases_each)) for target in (OWN, ARM)})


def _run(command: Sequence[str]) -> str:
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        say(process.stdout[-3000:])
        raise RuntimeError(f"{command[0]} ended with code {process.returncode}")
    return process.stdout


def main() -> int:
    """Return exit code 1 if a bit differs."""
    if reason := missing():
        say(f"skipped: {reason}")
        return 0
    result = prove()
    for line in result.wrong[:10]:
        say(f"not the same bits: {line}")
    say(f"{result.pairs} products of {', '.join(sorted(result.builds))}: {len(result.wrong)} differ")
    return 1 if result.wrong or not result.pairs else 0


if __name__ == "__main__":
    sys.exit(main())
