"""Send visits in a closed loop (each client waits for its answer) or an open loop (arrivals at given times).

An open loop models real traffic; a closed loop finds a server's maximum throughput. The clock can be replaced.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from quire.bench.calls import CallMaker, HttpCall
from quire.bench.outcome import Outcome, Run
from quire.errors import ConfigError
from quire.workload.visits import Visit

SendCall = Callable[[HttpCall, float], Awaitable[Outcome]]
"""Sends a call; the second argument is the time when it was due."""
Watch = Callable[[Outcome], None]
"""Called with each outcome when it is complete."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The start times of visits."""

    concurrency: int | None = None
    """Closed loop: number of clients. Open loop: maximum number of concurrent visits; others wait in the client."""
    moments_s: tuple[float, ...] | None = None
    """Open loop: the arrival time of each visit, from the start. None: a closed loop."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"expected a concurrency of at least 1, got {self.concurrency}", code="no_concurrency")
        if self.moments_s is None and self.concurrency is None:
            raise ConfigError("expected a concurrency (closed loop) or arrivals (open loop), got neither")


class RunClock:
    """The clock for timestamps and waiting."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return perf_counter()

    async def sleep_until(self, moment_s: float) -> None:
        """Sleep until a time of this clock. Returns at once if it is past, and late if the event loop is busy."""
        await asyncio.sleep(max(0.0, moment_s - perf_counter()))


class LoadRun:
    """Runs visits with a pace."""

    def __init__(
        self, maker: CallMaker, send: SendCall, watch: Watch = lambda _: None, clock: RunClock | None = None
    ) -> None:
        self._maker = maker
        self._send = send
        self._watch = watch
        self._clock = clock or RunClock()
        self._outcomes: list[Outcome] = []

    async def run(self, visits: Sequence[Visit], pace: Pace) -> Run:
        """Run all visits to their ends, and return the outcomes."""
        self._maker.check(visits)
        self._outcomes = []
        # The first prompts are generated before the clock starts: the work would delay requests.
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
        """Send turn after turn. Stop at a failure, because the next turn would need the answer."""
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
