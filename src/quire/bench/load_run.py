"""Send visits in a closed loop (each client waits for its answer) or an open loop (arrivals at fixed times).

An open loop models real traffic; a closed loop finds a server's maximum throughput. Tests replace the clock.
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
OnOutcome = Callable[[Outcome], None]
"""Called with the outcome of each request when the request has ended."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The start times of visits."""

    concurrency: int | None = None
    """Closed loop: number of clients. Open loop: maximum number of concurrent visits; more visits wait."""
    arrivals_s: tuple[float, ...] | None = None
    """Open loop: the arrival time of each visit, relative to the start. None: a closed loop."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"expected a concurrency of at least 1, got {self.concurrency}", code="no_concurrency")
        if self.arrivals_s is None and self.concurrency is None:
            raise ConfigError("expected a concurrency (closed loop) or arrivals (open loop), got neither")


class RunClock:
    """The clock for timestamps and waiting."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return perf_counter()

    async def sleep_until(self, moment_s: float) -> None:
        """Sleep until a time of this clock. Returns at once if it has passed, and late if the event loop is busy."""
        await asyncio.sleep(max(0.0, moment_s - perf_counter()))


class LoadRun:
    """Runs visits (conversations of one or more turns) at a pace."""

    def __init__(
        self, maker: CallMaker, send: SendCall, on_outcome: OnOutcome = lambda _: None, clock: RunClock | None = None
    ) -> None:
        self._maker = maker
        self._send = send
        self._on_outcome = on_outcome
        self._clock = clock or RunClock()
        self._outcomes: list[Outcome] = []

    async def run(self, visits: Sequence[Visit], pace: Pace) -> Run:
        """Run all visits to their ends, and return the outcomes."""
        self._maker.check(visits)
        self._outcomes = []
        # The first prompts are generated before the clock starts: the work would delay requests.
        first_calls = [(visit, self._maker.make_call(visit, ())) for visit in visits]
        started_s = self._clock.now_s()
        if pace.arrivals_s is None:
            queue, num_clients = iter(first_calls), min(pace.concurrency or 1, len(first_calls))
            await asyncio.gather(*(self._run_client(queue) for _ in range(num_clients)))
        else:
            await self._run_open_loop(first_calls, pace, started_s)
        ended_s = max((outcome.ended_s for outcome in self._outcomes), default=started_s)
        return Run(started_s, ended_s, tuple(self._outcomes))

    async def _run_client(self, queue: Iterator[tuple[Visit, HttpCall]]) -> None:
        for visit, first_call in queue:
            await self._run_visit(visit, first_call, self._clock.now_s())

    async def _run_open_loop(self, calls: Iterable[tuple[Visit, HttpCall]], pace: Pace, started_s: float) -> None:
        slots = asyncio.Semaphore(pace.concurrency) if pace.concurrency else None
        async with asyncio.TaskGroup() as group:
            for (visit, first_call), arrival_s in zip(calls, pace.arrivals_s or (), strict=True):
                due_s = started_s + arrival_s
                await self._clock.sleep_until(due_s)
                group.create_task(self._run_in_slot(slots, visit, first_call, due_s))

    async def _run_in_slot(self, slots: asyncio.Semaphore | None, visit: Visit, call: HttpCall, due_s: float) -> None:
        if slots is None:
            await self._run_visit(visit, call, due_s)
            return
        async with slots:
            await self._run_visit(visit, call, due_s)

    async def _run_visit(self, visit: Visit, call: HttpCall, due_s: float) -> None:
        """Send one turn after the other, from `call` on. Stop at a failure, because the next turn needs the answer."""
        answers: list[str] = []
        while True:
            outcome = await self._send(call, due_s)
            self._outcomes.append(outcome)
            self._on_outcome(outcome)
            answers.append(outcome.text)
            if not outcome.is_ok or len(answers) == len(visit.turns):
                return
            call = self._maker.make_call(visit, answers)
            due_s = self._clock.now_s()
