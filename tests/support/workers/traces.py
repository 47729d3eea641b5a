"""A simulation that writes down what crosses the seam and what clients are told, in words that outlive refactorings.

`python -m tests.support.workers.traces` prints the traces of the committed runs, for who means to change what they say.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from quire.core.events import Finished, Preempted, PromptLogprobs, RequestEvent, SequenceFinished, Token
from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan, StepResult, TokenLogprobs
from quire.sim.server.config import SimConfig, make_config
from quire.sim.server.simulation import Simulation

GOLDEN = Path(__file__).parents[2] / "sim" / "golden.json"
RUNS = [
    *(("chaos", seed, 60) for seed in range(20)),
    *((name, 1, 30) for name in ("chat", "agents", "flood", "tenants")),
]
"""Scenario, seed, number of requests."""


class _Stamped(list[RequestEvent]):
    """Events, and what time a scheduler had been told when it made them: they do not say so themselves."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.at_s: list[float] = []
        self._scheduler = scheduler

    def append(self, event: RequestEvent) -> None:
        super().append(event)
        self.at_s.append(self._scheduler._now_s)

    def __iadd__(self, events: Iterable[RequestEvent]) -> Self:  # type: ignore[misc, override]
        for event in events:
            self.append(event)
        return self


class TracedSimulation(Simulation):
    """Every plan and every event goes into a digest."""

    def __init__(self, config: SimConfig) -> None:
        self._trace = blake2b(digest_size=16)
        super().__init__(config)

    def trace(self) -> str:
        self.run()
        return self._trace.hexdigest()

    def _start_worker(self) -> None:
        super()._start_worker()
        run = self.runner.run

        def traced(plan: StepPlan) -> StepResult:
            self._write(_plan_words(plan))
            return run(plan)

        self.runner.run = traced  # type: ignore[method-assign]
        scheduler = self.scheduler

        def take() -> list[RequestEvent]:
            events, scheduler._events = scheduler._events, _Stamped(scheduler)
            return events

        take()
        scheduler.take_events = take  # type: ignore[method-assign]

    def _take_events(self, events: list[RequestEvent]) -> None:
        assert isinstance(events, _Stamped)
        for event, at_s in zip(events, events.at_s, strict=True):
            if words := _event_words(event, at_s):
                self._write(words)
        super()._take_events(events)

    def _write(self, words: object) -> None:
        self._trace.update(f"{words}\n".encode())


def _plan_words(plan: StepPlan) -> tuple[object, ...]:
    copies = [(copy.src, copy.dst) for copy in plan.copies]
    items = [
        (
            item.sequence_id,
            tuple(item.token_ids),
            item.first_position,
            tuple(item.block_ids),
            None
            if item.sampling is None
            else (
                item.sampling.seed,
                item.sampling.sequence_index,
                item.sampling.position,
                item.sampling.num_prompt_tokens,
                item.sampling.known_tokens,
            ),
        )
        for item in plan.items
    ]
    return plan.step, copies, items


def _event_words(event: Any, at_s: float) -> tuple[object, ...]:
    """Nothing of events that only say how far a request is on its way in."""
    match event:
        case Token():
            logprobs = () if event.logprobs is None else _logprob_words([event.logprobs])
            return event.request_id, event.sequence_index, at_s, event.token_id, event.num_output_tokens, logprobs
        case PromptLogprobs():
            return event.request_id, event.first_position, _logprob_words(event.logprobs)
        case Preempted():
            return event.request_id, event.sequence_index, at_s
        case SequenceFinished():
            ended = (event.reason.value, event.num_output_tokens, event.error)
            return event.request_id, event.sequence_index, at_s, *ended
        case Finished():
            counts = (event.num_prompt_tokens, event.num_cached_tokens, event.num_output_tokens)
            return event.request_id, at_s, *counts
    return ()


def _logprob_words(entries: Sequence[TokenLogprobs]) -> list[tuple[object, ...]]:
    return [(one.token_id, one.logprob, one.rank, tuple(one.alternatives)) for one in entries]


def recorded() -> dict[str, str]:
    """The same as they were when they were recorded."""
    found: dict[str, str] = json.loads(GOLDEN.read_text())
    return found


def traces() -> dict[str, str]:
    """Each committed run and its trace."""
    return {
        f"{name} {seed} {count}": TracedSimulation(make_config(name, seed, count)).trace() for name, seed, count in RUNS
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(traces(), indent=2) + "\n")
