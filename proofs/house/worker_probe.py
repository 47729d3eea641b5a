"""A real worker that writes the names of its loaded modules to a file when it ends.

A supervisor starts it like any worker: `python -m proofs.house.worker_probe SOCKET PAGE LEASH PARENT`.
"""

import os
import sys
from pathlib import Path

from quire.worker.child.process import run_worker

REPORT = "WORKER_MODULES"
"""The environment variable with the path of that file."""

if __name__ == "__main__":
    code = run_worker(sys.argv[1:])
    Path(os.environ[REPORT]).write_text("\n".join(sorted(sys.modules)))
    sys.exit(code)
