"""What the front page says that is about no server: the simulator without tensors, the commands it shows."""

import subprocess
import sys

from tests.promises.registry import ROOT

WITHOUT_TENSORS = """
import sys
for name in ("torch", "numpy", "transformers", "safetensors", "starlette", "uvicorn", "zmq"):
    sys.modules[name] = None
sys.argv = ["quire", "sim", "--scenario", "tenants", "--seed", "3"]
from quire.cli import main
main()
"""


def test_a_simulator_drives_the_code_that_serves_without_tensors() -> None:
    around = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TENSORS], capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stderr
    assert "greedy" in done.stdout
