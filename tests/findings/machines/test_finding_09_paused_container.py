"""A container that was paused finds its healthy worker alive; a worker that is stuck is killed all the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
STUCK_S = 4.0
PAUSE_S = 5.0

_PARENT = """
import asyncio, sys
from quire import SamplingParams
from quire.worker.parent.worker_plan import Limits
from tests.support.servers.served import served

async def main():
    async with served(limits=Limits(stuck_s=float(sys.argv[1])), step_s=0.01) as model:
        print(model.supervisor.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(1.0)  # several looks at the worker
        await model.generate("question", SamplingParams(max_tokens=5, ignore_eos=True))
        print(model.supervisor.num_restarts, flush=True)

asyncio.run(main())
"""


def test_a_pause_of_parent_and_worker_is_no_reason_to_kill() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(STUCK_S)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        for pid in (parent.pid, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
    finally:
        for pid in (parent.pid, worker):
            os.kill(pid, signal.SIGCONT)
    said, _ = parent.communicate("go on\n", timeout=60)
    assert parent.returncode == 0
    assert int(said) == 0, "the worker was killed and its model loaded anew"
