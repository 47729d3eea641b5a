"""Who sends when, on a clock moved by hand."""

import asyncio
import heapq
import json
from collections.abc import Sequence

from quire.bench.calls import CallMaker, HttpCall
from quire.bench.load_run import LoadRun, Pace, RunClock
from quire.bench.measures import max_concurrent
from quire.bench.outcome import Outcome, Run
from quire.errors import ConfigError
from quire.workload.mixes import MIXES, MixSizes, sample_visits
from quire.workload.visits import Visit
from quire.workload.writing import SpanWriter
from tests.support.errors import raises_code
from tests.unit.bench.outcomes import outcome


class HandClock(RunClock):
    """Moves to the next moment somebody waits for when nobody has anything else to do."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until(self, moment_s: float) -> None:
        wake = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (moment_s, self._count, wake))
        await wake

    async def run(self) -> None:
        while True:
            for _ in range(20):  # let everyone get to their next wait
                await asyncio.sleep(0)
            if self._sleepers:
                moment_s, _, wake = heapq.heappop(self._sleepers)
                self._now_s = max(self._now_s, moment_s)
                wake.set_result(None)


class FakeServer:
    """Takes a second for each answer; fails those it is told to."""

    def __init__(self, clock: HandClock, failing: Sequence[str] = ()) -> None:
        self.calls: list[HttpCall] = []
        self._clock = clock
        self._failing = failing

    async def ask(self, call: HttpCall, due_s: float) -> Outcome:
        self.calls.append(call)
        sent_s = self._clock.now_s()
        await self._clock.sleep_until(sent_s + 1.0)
        error = "http 503" if call.name in self._failing else None
        return outcome(sent_s, [sent_s + 1.0], name=call.name, due_s=due_s, error=error, pieces=("answer",))


def run(visits: Sequence[Visit], pace: Pace, failing: Sequence[str] = ()) -> tuple[Run, FakeServer]:
    clock = HandClock()
    server = FakeServer(clock, failing)

    async def main() -> Run:
        time = asyncio.create_task(clock.run())
        done = await LoadRun(CallMaker("m", "chat", SpanWriter("1")), server.ask, clock=clock).run(visits, pace)
        time.cancel()
        return done

    return asyncio.run(main()), server


def some(name: str, count: int, **sizes: int) -> list[Visit]:
    return sample_visits(MIXES[name], MixSizes(prompt_tokens=2, output_tokens=2, **sizes), "1", count)


def test_a_closed_loop_keeps_as_many_at_once_as_there_are_clients() -> None:
    done, _ = run(some("distinct", 9), Pace(concurrency=3))
    assert max_concurrent((one.sent_s, one.ended_s) for one in done.outcomes) == 3
    assert (len(done.outcomes), done.duration_s) == (9, 3.0)


def test_an_open_loop_sends_when_it_is_time_whoever_is_still_waiting() -> None:
    done, _ = run(some("distinct", 4), Pace(arrivals_s=(0.0, 0.25, 0.5, 3.0)))
    assert sorted(one.sent_s - done.started_s for one in done.outcomes) == [0.0, 0.25, 0.5, 3.0]
    assert done.duration_s == 4.0


def test_an_open_loop_with_few_places_is_late_and_says_so() -> None:
    done, _ = run(some("distinct", 3), Pace(concurrency=1, arrivals_s=(0.0, 0.1, 0.2)))
    assert [round(one.sent_s - one.due_s, 6) for one in done.outcomes] == [0.0, 0.9, 1.8]


def test_the_next_turn_waits_for_the_answer_and_carries_it() -> None:
    done, server = run(some("chat", 3, num_turns=3), Pace(concurrency=2))
    assert [one.sent_s - done.started_s for one in done.outcomes] == [0.0, 1.0, 2.0]
    messages = json.loads(server.calls[2].body)["messages"]
    assert [one["content"] for one in messages if one["role"] == "assistant"] == ["answer", "answer"]


def test_a_visit_ends_when_an_answer_does_not_come() -> None:
    done, _ = run(some("chat", 6, num_turns=3), Pace(concurrency=1), failing=("chat0.1",))
    assert [one.name for one in done.outcomes] == ["chat0.0", "chat0.1", "chat1.0", "chat1.1", "chat1.2"]


def test_a_load_without_a_pace_is_refused() -> None:
    with raises_code(ConfigError, "invalid_config"):
        Pace()
    with raises_code(ConfigError, "no_concurrency"):
        Pace(concurrency=0)
