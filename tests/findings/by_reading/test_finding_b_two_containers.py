"""Two containers that share a folder for temporary files leave each other's sockets alone."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq.asyncio

from quire.worker.parent.handle import WorkerProcess

ROOT = Path(__file__).parents[3]
UNSHARE = shutil.which("unshare") or ""
_SWEEP = """
import sys
from pathlib import Path
from quire.worker.parent.spawned_worker import _sweep
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


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path may have about a hundred characters, and pytest's own folders grow with every run."""
    with TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.mark.skipif(not may_unshare(), reason="a process id namespace needs unshare and the right to make one")
def test_a_live_folder_of_another_container_is_not_removed(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))

    async def live() -> list[str]:
        # A worker that never connects: its folder is needed for as long as it lives.
        context = zmq.asyncio.Context()
        process = WorkerProcess(context, 8, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        try:
            await asyncio.to_thread(sweep_elsewhere, short_folder)
            return [path.name for path in short_folder.iterdir()]
        finally:
            await process.close()
            context.destroy(linger=0)

    assert len(asyncio.run(live())) == 1
    assert list(short_folder.iterdir()) == []
