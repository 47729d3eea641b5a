"""Engines on oracles that live a random life and write it down: whatever a server does to a scheduler, in any order."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec.structs import replace

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity, PendingStep
from quire.core.request import Continuation, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.step_cost import StepCost
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import GRAMMAR_FAILED, NO_MASKS, Masks, RowError, RowResult, StepPlan, StepResult
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.trace_recorder import TraceSettings
from quire.observe.trace_file import make_trace_file
from tests.support.changed import changed

VOCABULARY = 6
KEY = bytes(range(32))
CHEAP = StepCost(((1, 1.0), (64, 1.001)))
"""By which nearly every guess pays."""


class SpoiltRunner(OracleRunner):
    """Fails a row now and then, or forces tokens behind those chosen."""

    def __init__(self, capacity: Capacity, random: Random) -> None:
        super().__init__(capacity)
        self._random = random

    def start(self, plan: StepPlan) -> PendingStep:
        return _Spoilt(self, plan, self._random)


class _Spoilt:
    def __init__(self, runner: SpoiltRunner, plan: StepPlan, random: Random) -> None:
        self._runner, self._plan, self._random = runner, plan, random

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        result = self._runner.run(self._plan, masks)
        return changed(result, rows={name: self._spoilt(row) for name, row in result.rows.items()})

    def _spoilt(self, row: RowResult) -> RowResult:
        dice = self._random.random()
        if dice < 0.01:
            return RowResult(error=RowError(GRAMMAR_FAILED, "<secret> was wrong"))
        if dice < 0.1 and row.token_ids and not row.logprobs:
            return changed(row, forced=(self._random.randrange(VOCABULARY),) * self._random.randint(1, 3))
        return row


def traced_engine(path: Path, random: Random, *, own_tokens: bool = False, kept: int | None = None) -> Engine:
    """Small enough that everything collides; with `kept` its model has recurrent layers."""
    running = random.choice((2, 5))
    slots = 0 if kept is None else running + 1 + kept
    capacity = Capacity(random.choice((8, 14, 40)), 2, 40, 16, VOCABULARY, 16, slots)
    config = SchedulerConfig(
        16,
        running,
        40,
        queue=QueueConfig(6, 3.0, 1.0, 0.0),
        step_cost=random.choice((None, CHEAP)),
        step_limit_s=random.choice((0.0, 0.05, 0.3)),
    )
    engine = Engine(SpoiltRunner(capacity, random), config, ModelIdentity("oracle", "slots"), KEY)
    if not path.exists():
        make_trace_file(path)
    engine.record(TraceSettings(str(path), 1 << 30, KEY, own_tokens), 0.0)
    return engine


class RandomLife:
    """Does to an engine what clients and operators do."""

    def __init__(self, engine: Engine, random: Random) -> None:
        self.engine = engine
        self.random = random
        self.now_s = 1000.0
        self.num_requests = 0
        self.names: list[str] = []

    def live(self, num_moves: int) -> None:
        moves: tuple[Callable[[], None], ...] = (
            self.submit, self.submit, self.step, self.step, self.step, self.step, self.cancel, self.rarely,
        )  # fmt: skip
        for _ in range(num_moves):
            self.now_s += self.random.choice((0.0, 0.125, 0.7))
            self.random.choice(moves)()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.close()

    def step(self) -> None:
        self.engine.step(self._clock)

    def _clock(self) -> float:
        self.now_s += self.random.choice((0.01, 0.1, 0.1, 0.7))
        return self.now_s

    def submit(self) -> None:
        if self.random.random() < 0.1:
            self.engine.restore(replace(self._request(), continuations=(Continuation(0, (1, 2)),)))
        else:
            self.engine.submit(self._request())

    def cancel(self) -> None:
        if self.names and self.random.random() < 0.4:
            self.engine.cancel(self.random.choice(self.names), self.random.choice((None, 0, 1)))

    def rarely(self) -> None:
        dice, tokens = self.random.random(), self._tokens(12)
        if dice < 0.1:
            self.engine.clear()
        elif dice < 0.3:
            self.engine.explain(self.engine.info.namespace("a"), tokens, self.now_s)
        elif dice < 0.4:
            self.engine.submit(replace(self._request(), request_id=self.names[-1] if self.names else "first"))

    def _tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(2) for _ in range(self.random.randint(1, most)))

    def _request(self) -> Request:
        random = self.random
        self.num_requests += 1
        name = f"request-{self.num_requests}"
        self.names.append(name)
        params = ResolvedSampling(
            max_tokens=random.choice((0, 1, 4, 12)),
            temperature=random.choice((0.0, 1.0)),
            stop_token_ids=frozenset(random.choice(((), (1,), (0, 5)))),
            prompt_logprobs=random.choice((None, None, None, 1)),
            logprobs=random.choice((None, None, 2)),
        )
        group = random.choice("ab")
        return Request(
            name,
            self._tokens(30),
            self.engine.info.namespace(group),
            self.now_s - random.random(),
            params,
            seed=random.randrange(1 << 20),
            tenant=group,
            priority=random.choice(list(PriorityClass)),
            continuations=tuple(Continuation(index) for index in range(random.choice((1, 1, 2)))),
            deadline_s=random.choice((None, None, self.now_s + 2.0)),
            is_explained=random.random() < 0.2,
            has_stop_texts=random.random() < 0.3,
        )


def write_life(
    path: Path, seed: int, num_moves: int = 120, *, own_tokens: bool = False, kept: int | None = None
) -> None:
    """A whole one, appended to the file or into a new one."""
    random = Random(seed)
    life = RandomLife(traced_engine(path, random, own_tokens=own_tokens, kept=kept), random)
    life.live(num_moves)
    life.finish()
