"""`make core-tests`: runs the tests of the core without torch, and limits the processor time that they take."""

import resource
import subprocess
import sys

from benchmarks.record import ROOT, say

TESTS = ("tests/unit/core", "tests/property", "tests/sim")
MAX_S = 60.0
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider"]))
"""


def main() -> int:
    process = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *TESTS, *sys.argv[1:]], cwd=ROOT, stdout=sys.stderr)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    say(f"{cpu_s:.1f} s of processor time, at most {MAX_S:g}")
    return process.returncode or int(cpu_s > MAX_S)


if __name__ == "__main__":
    sys.exit(main())
