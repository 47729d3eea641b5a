"""Loads and renders hostile templates beside an event loop: is the loop blocked, and how large do the processes get?"""

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
    """One delay of an event loop, and how much of it was stolen by the host, or spent waiting for a processor."""

    late_s: float
    stolen_s: float
    queued_s: float

    @property
    def own_s(self) -> float:
        """The delay that this process itself causes."""
        return self.late_s - self.stolen_s - self.queued_s


@dataclass
class Watch:
    """The pauses of an event loop, and the peak memory of this process and of its children."""

    stolen: StolenTime
    blocked: list[Pause] = field(default_factory=list)
    peak_helper_bytes: int = 0
    peak_parent_bytes: int = 0
    is_over: bool = False

    async def look(self) -> None:
        """Wake up every 5 ms, and note delays that this process itself causes."""
        while not self.is_over:
            queued_before_s, stolen_before = _queued_s(), self.stolen.now()
            start_s = time.monotonic()
            await asyncio.sleep(0.005)
            late_s = time.monotonic() - start_s - 0.005
            pause = Pause(late_s, self.stolen.since(stolen_before), _queued_s() - queued_before_s)
            if pause.own_s > BLOCKED_S:
                self.blocked.append(pause)
            self.peak_helper_bytes = max([self.peak_helper_bytes, *map(resident_bytes, _children())])
            self.peak_parent_bytes = max(self.peak_parent_bytes, resident_bytes(os.getpid()))


def _queued_s() -> float:
    """How long threads of this process were ready to run while other programs kept the processors busy.

    All threads count: one that holds the interpreter's lock while it waits for a processor blocks the loop as well.
    """
    times_ns = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            times_ns.append(int(path.read_text().split()[1]))
    return sum(times_ns) / 1e9


def _children() -> list[int]:
    pids_of_threads = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in pids_of_threads for pid in pids]


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # the process has ended


def burn(source: str) -> list[float]:
    """Seconds to load a template, and to render "hello", once a helper process is idle."""
    IDLE_HELPERS.give_back(IDLE_HELPERS.take())
    start_s = time.monotonic()
    try:
        template = ChatTemplate(source, {})
    except QuireError:
        return [time.monotonic() - start_s]
    loaded_s = time.monotonic()
    try:
        template.render(HELLO)
    except QuireError:
        pass
    finally:
        end_s = time.monotonic()
        template.close()
    return [loaded_s - start_s, end_s - loaded_s]


def burn_all(sources: Sequence[tuple[str, str]], watch: Watch) -> list[tuple[str, float]]:
    """Burn one template after the other beside an event loop; returns (family, seconds) of each load and each chat."""
    return asyncio.run(_burn_all(sources, watch))


async def _burn_all(sources: Sequence[tuple[str, str]], watch: Watch) -> list[tuple[str, float]]:
    look_task = asyncio.create_task(watch.look())
    burns = []
    try:
        for family, source in sources:
            burns += [(family, seconds) for seconds in await asyncio.to_thread(burn, source)]
    finally:
        watch.is_over = True
        await look_task
    return burns
