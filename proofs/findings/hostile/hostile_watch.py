"""Hostile templates beside an event loop that is watched: is it held up, and who grows meanwhile?"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from proofs.framework.stolen_time import StolenTime
from quire.errors import QuireError
from quire.text.chat.rendering.template import IDLE_HELPERS, ChatTemplate

BLOCKED_S = 0.1
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True, slots=True)
class Pause:
    """How long an event loop did not come round, and how much of it others had taken."""

    late_s: float
    stolen_s: float
    queued_s: float

    @property
    def own_s(self) -> float:
        """What is left for us to answer for."""
        return self.late_s - self.stolen_s - self.queued_s


@dataclass
class Watch:
    """What an event loop and the processes of this one do meanwhile."""

    stolen: StolenTime
    blocked: list[Pause] = field(default_factory=list)
    peak_helper_bytes: int = 0
    peak_parent_bytes: int = 0
    is_over: bool = False

    async def look(self) -> None:
        """Come round every few milliseconds; note when that took longer, and was not the machine's doing."""
        while not self.is_over:
            queued_s, stolen = _queued_s(), self.stolen.now()
            start = time.monotonic()
            await asyncio.sleep(0.005)
            late_s = time.monotonic() - start - 0.005
            pause = Pause(late_s, self.stolen.since(stolen), _queued_s() - queued_s)
            if pause.own_s > BLOCKED_S:
                self.blocked.append(pause)
            self.peak_helper_bytes = max([self.peak_helper_bytes, *map(resident_bytes, _children())])
            self.peak_parent_bytes = max(self.peak_parent_bytes, resident_bytes(os.getpid()))


def _queued_s() -> float:
    """How long threads of this process were ready to run and no processor was free: another program's doing.

    All of them, because one that has the interpreter's lock and waits for a processor holds up the loop as well.
    """
    told = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            told.append(int(path.read_text().split()[1]))
    return sum(told) / 1e9


def _children() -> list[int]:
    told = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in told for pid in pids]


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # it has ended


def burn(source: str) -> list[float]:
    """Seconds to load, and to say hello, from the moment a process is there for it."""
    IDLE_HELPERS.give_back(IDLE_HELPERS.take())
    start = time.monotonic()
    try:
        template = ChatTemplate(source, {})
    except QuireError:
        return [time.monotonic() - start]
    loaded = time.monotonic()
    try:
        template.render(HELLO)
    except QuireError:
        pass
    finally:
        ended = time.monotonic()
        template.close()
    return [loaded - start, ended - loaded]


def burn_all(sources: Sequence[tuple[str, str]], watch: Watch) -> list[tuple[str, float]]:
    """One after the other beside an event loop: (family, seconds) of each load and each chat."""
    return asyncio.run(_burn_all(sources, watch))


async def _burn_all(sources: Sequence[tuple[str, str]], watch: Watch) -> list[tuple[str, float]]:
    looking = asyncio.create_task(watch.look())
    took = []
    try:
        for family, source in sources:
            took += [(family, seconds) for seconds in await asyncio.to_thread(burn, source)]
    finally:
        watch.is_over = True
        await looking
    return took
