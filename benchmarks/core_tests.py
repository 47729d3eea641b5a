"""`make core-tests`: the tests of the core where torch cannot be imported, and the processor time that they take."""

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
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *TESTS, *sys.argv[1:]], cwd=ROOT, stdout=sys.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken_s = used.ru_utime + used.ru_stime
    say(f"{taken_s:.1f} s of processor time, at most {MAX_S:g}")
    return done.returncode or int(taken_s > MAX_S)


if __name__ == "__main__":
    sys.exit(main())
