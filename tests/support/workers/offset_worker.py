"""The oracle's worker in a process whose clock is so many seconds ahead of everybody else's, or behind.

python -m tests.support.workers.offset_worker SECONDS SOCKET PAGE LEASH PARENT
"""

import runpy
import sys
import time

if __name__ == "__main__":
    really, ahead_s = time.monotonic, float(sys.argv.pop(1))
    time.monotonic = lambda: really() + ahead_s  # before anything of quire's has taken it
    runpy.run_module("tests.support.workers.oracle_worker", run_name="__main__")
