"""`quire fleet gateway` with a probe inside: the longest turn of its event loop, in processor time of its thread.

    python -m proofs.findings.members.probed_gateway FILE fleet gateway ...

A timer fires every millisecond. What the thread has worked between two firings is at least the longest turn between
them, so that the longest such time is a bound from above. SIGUSR1 begins anew, SIGUSR2 writes the figures to FILE.
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
SHOWN = 20


class LoopProbe:
    """Lives on the loop that it watches."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns = list[float]()
        """The longest, the longest first."""

    def start(self) -> None:
        """From within the loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._begin_anew)
        loop.add_signal_handler(signal.SIGUSR2, self._write)
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        before_s = thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = thread_time()
            if len(self._turns) < SHOWN or now_s - before_s > self._turns[-1]:
                self._turns = sorted([*self._turns, now_s - before_s], reverse=True)[:SHOWN]
            before_s = now_s

    def _begin_anew(self) -> None:
        self._turns = []

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps([1000 * turn for turn in self._turns]))
        part.replace(self._file)


def main(file: str) -> None:
    """Run the command line with the probe in the loop of the first model that is opened."""
    probe, entered = LoopProbe(Path(file)), FleetModel.__aenter__

    async def enter(model: FleetModel) -> FleetModel:
        probe.start()
        return await entered(model)

    FleetModel.__aenter__ = enter  # type: ignore[method-assign, assignment]
    quire()


if __name__ == "__main__":
    main(sys.argv.pop(1))
