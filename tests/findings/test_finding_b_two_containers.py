"""Two containers that share a folder for temporary files leave each other's sockets alone."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.asyncio

from quire.worker.handle import WorkerProcess

ROOT = Path(__file__).parents[2]
UNSHARE = shutil.which("unshare") or ""
_SWEEP = """
import sys
from pathlib import Path
from quire.worker.handle import _sweep
_sweep(Path(sys.argv[1]))
"""


def may_unshare() -> bool:
    """Whether a process may have a namespace of its own here."""
    return bool(UNSHARE) and subprocess.run([UNSHARE, "--pid", "--fork", "true"], capture_output=True).returncode == 0


def sweep_elsewhere(folder: Path) -> None:
    """As a server in another container does, to which our process ids mean nothing."""
    command = [UNSHARE, "--pid", "--fork", sys.executable, "-c", _SWEEP, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, env=environment, check=True, timeout=120)


@pytest.mark.skipif(not may_unshare(), reason="a process id namespace needs unshare and the right to make one")
def test_a_live_folder_of_another_container_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def live() -> list[str]:
        # A worker that never connects: its folder is needed for as long as it lives.
        context = zmq.asyncio.Context()
        process = WorkerProcess(context, 8, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        try:
            await asyncio.to_thread(sweep_elsewhere, tmp_path)
            return [path.name for path in tmp_path.iterdir()]
        finally:
            await process.close()
            context.destroy(linger=0)

    assert len(asyncio.run(live())) == 1
    assert list(tmp_path.iterdir()) == []
