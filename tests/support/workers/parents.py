"""Parents that end in every way there is, and what is left of their workers afterwards."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.support.machine.patience import PATIENCE_S
from tests.support.workers.oracle_worker import ROOT

ENDS = {
    "returns": "return",
    "raises": "raise SystemError('on purpose')",
    "leaves": "os._exit(3)",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGKILL": "",
    "SIGTERM": "",
    "SIGINT": "",
    "SIGHUP": "",
    "SIGQUIT": "",
    "SIGSEGV": "",
}
"""What a parent does in the end; a signal's name is sent to it instead."""

_PARENT = """
import asyncio, os, signal, sys
from tests.support.servers.served import served
from quire import SamplingParams

# Whoever starts us in the background may have had these ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)

async def main():
    print("on my way", flush=True)
    async with served() as model:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        tasks = [asyncio.create_task(model.generate("x", params)) for _ in range(3)]
        await asyncio.sleep(float(sys.argv[1]))
        {end}
        await asyncio.sleep(600)

asyncio.run(main())
"""


def end_a_parent(end: str, folder: Path, random: Random) -> None:
    """Start one whose temporary files lie in this folder, and see it end, somewhere between its first breath and its
    streams.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(folder)}
    command = [sys.executable, "-c", _PARENT.replace("{end}", ENDS[end]), str(random.uniform(0.0, 0.3))]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    parent.stdout.readline()
    if end.startswith("SIG"):
        time.sleep(random.uniform(0.0, 1.2))
        parent.send_signal(signal.Signals[end])
    parent.wait(timeout=PATIENCE_S)
    parent.stdout.close()


def left_of(folder: Path, within_s: float = PATIENCE_S) -> list[str]:
    """Workers whose socket was in this folder, and whatever lies in it, once it had time to go."""
    deadline_s = time.monotonic() + within_s
    while (workers := workers_of(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return [*(f"worker {pid}" for pid in workers), *(path.name for path in folder.iterdir())]


def workers_of(folder: Path) -> list[int]:
    """Processes whose socket was in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            pid = int(path.parent.name)
            if str(folder).encode() in path.read_bytes() and is_alive(pid):
                found.append(pid)
    return found


def is_alive(pid: int) -> bool:
    """It runs, and is not only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
