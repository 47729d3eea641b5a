"""Who sends when: a closed loop (so many clients, each waits for its answer) or an open one (arrivals come regardless).

An open loop is how the world behaves and a closed loop is how a server's best is found. The clock is handed in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

from quire.bench.calls import CallMaker, HttpCall
from quire.bench.outcome import Outcome, Run
from quire.bench.pace import Pace
from quire.workload.visits import Visit

SendCall = Callable[[HttpCall, float], Awaitable[Outcome]]
"""Sends a call that was due at a moment."""
Watch = Callable[[Outcome], None]
"""Told of each outcome as it comes."""


class RunClock(Protocol):
    """Seconds, and how to wait for them."""

    def now_s(self) -> float:
        """Seconds that never go back."""

    async def sleep_until(self, moment_s: float) -> None:
        """Come back at that moment, or at once if it is past."""


class RealClock:
    """The one on the wall."""

    def now_s(self) -> float:
        """Seconds of the clock that stamps events."""
        return perf_counter()

    async def sleep_until(self, moment_s: float) -> None:
        """Wait; a late event loop comes back late, and the outcome says so."""
        await asyncio.sleep(max(0.0, moment_s - perf_counter()))


class LoadRun:
    """Visits under a pace, once."""

    def __init__(
        self, maker: CallMaker, send: SendCall, watch: Watch = lambda _: None, clock: RunClock | None = None
    ) -> None:
        self._maker = maker
        self._send = send
        self._watch = watch
        self._clock = clock or RealClock()
        self._outcomes: list[Outcome] = []

    async def run(self, visits: Sequence[Visit], pace: Pace) -> Run:
        """All visits to their ends."""
        self._maker.check(visits)
        self._outcomes = []
        # Written before the clock runs: making prompts is work, and must not be taken for lateness.
        firsts = [(visit, self._maker.call(visit, ())) for visit in visits]
        started_s = self._clock.now_s()
        if pace.moments_s is None:
            waiting = iter(firsts)
            await asyncio.gather(*(self._client(waiting) for _ in range(min(pace.concurrency or 1, len(firsts)))))
        else:
            await self._arrive(firsts, pace, started_s)
        ended_s = max((one.ended_s for one in self._outcomes), default=started_s)
        return Run(started_s, ended_s, tuple(self._outcomes))

    async def _client(self, waiting: Iterator[tuple[Visit, HttpCall]]) -> None:
        for visit, first in waiting:
            await self._visit(visit, first, self._clock.now_s())

    async def _arrive(self, firsts: Iterable[tuple[Visit, HttpCall]], pace: Pace, started_s: float) -> None:
        places = asyncio.Semaphore(pace.concurrency) if pace.concurrency else None
        async with asyncio.TaskGroup() as group:
            for (visit, first), moment_s in zip(firsts, pace.moments_s or (), strict=True):
                due_s = started_s + moment_s
                await self._clock.sleep_until(due_s)
                group.create_task(self._within(places, visit, first, due_s))

    async def _within(self, places: asyncio.Semaphore | None, visit: Visit, first: HttpCall, due_s: float) -> None:
        if places is None:
            await self._visit(visit, first, due_s)
            return
        async with places:
            await self._visit(visit, first, due_s)

    async def _visit(self, visit: Visit, first: HttpCall, due_s: float) -> None:
        """Turn after turn, as long as answers come; a client without an answer has nothing to go on from."""
        answers: list[str] = []
        call = first
        while True:
            outcome = await self._send(call, due_s)
            self._outcomes.append(outcome)
            self._watch(outcome)
            answers.append(outcome.text)
            if not outcome.is_ok or len(answers) == len(visit.turns):
                return
            call = self._maker.call(visit, answers)
            due_s = self._clock.now_s()
