"""`quire fleet gateway` with a probe inside: it measures the longest turns of the event loop, in processor time.

    python -m proofs.findings.members.probed_gateway FILE fleet gateway ...

A *turn* is one run of a callback. A timer fires every millisecond; the thread's processor time between two firings is
an upper bound of the turns between them. SIGUSR1 forgets the figures so far, SIGUSR2 writes them to FILE, in ms.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from time import thread_time

from quire.__main__ import main as quire
from quire.fleet.gateway.client import FleetModel

TICK_S = 0.001
NUM_TURNS = 20


class LoopProbe:
    """Measures the event loop on which it runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns = list[float]()
        """The NUM_TURNS longest in seconds, in descending order."""

    def start(self) -> None:
        """Start in the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._reset)
        loop.add_signal_handler(signal.SIGUSR2, self._write)
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        before_s = thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = thread_time()
            if len(self._turns) < NUM_TURNS or now_s - before_s > self._turns[-1]:
                self._turns = sorted([*self._turns, now_s - before_s], reverse=True)[:NUM_TURNS]
            before_s = now_s

    def _reset(self) -> None:
        self._turns = []

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps([1000 * turn for turn in self._turns]))
        part.replace(self._file)


def main(file: str) -> None:
    """Run the command line; entering a model starts the probe in its event loop."""
    probe, original_enter = LoopProbe(Path(file)), FleetModel.__aenter__

    async def enter(model: FleetModel) -> FleetModel:
        probe.start()
        return await original_enter(model)

    FleetModel.__aenter__ = enter  # type: ignore[method-assign, assignment]
    quire()


if __name__ == "__main__":
    main(sys.argv.pop(1))
