"""A real worker that writes down which modules it has loaded when it is told to close.

python -m proofs.house.worker_probe SOCKET PAGE LEASH PARENT, as a supervisor starts a worker.
"""

import os
import sys
from pathlib import Path

from quire.worker.child.process import run_worker

REPORT = "WORKER_MODULES"
"""The variable that names the file to write."""

if __name__ == "__main__":
    code = run_worker(sys.argv[1:])
    Path(os.environ[REPORT]).write_text("\n".join(sorted(sys.modules)))
    sys.exit(code)
