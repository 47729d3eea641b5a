"""An engine whose model has recurrent layers: nobody guesses, and nobody relies on what a broken step has moved."""

import pytest

from quire.backends.oracle import OracleRunner, answer_alone
from quire.backends.protocol import Capacity
from quire.core.events import Finished, RequestEvent, Token
from quire.core.inspect import invariants
from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.step_cost import StepCost
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.engine.engine import Engine, ModelIdentity
from quire.errors import ConfigError
from tests.support.errors import raises_code

VOCABULARY = 50
SHARED = tuple(range(1, 13))


class TornError(Exception):
    """The device went away for a moment."""


class TornRunner(OracleRunner):
    """Breaks off its next step where it is told to."""

    breaks: str | None = None

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        at, self.breaks = self.breaks, None
        if at == "before any copy":
            raise TornError
        result = super().run(plan, masks)
        if at == "after the last keep":
            for move in (*plan.slot_copies, *plan.cache_copies):
                self.states[move.dst] = 0xDEAD
            raise TornError
        return result


def new_engine(runner: OracleRunner, step_cost: StepCost | None = None) -> Engine:
    config = SchedulerConfig(max_step_tokens=64, max_running=4, step_cost=step_cost)
    return Engine(runner, config, ModelIdentity("oracle", "slots"), bytes(32))


def capacity(num_slots: int = 12) -> Capacity:
    """Blocks of four tokens."""
    return Capacity(64, 4, 1 << 20, 64, VOCABULARY, 32, num_slots)


class World:
    """An engine on such a runner; the tokens of every request are collected."""

    def __init__(self) -> None:
        self.runner = TornRunner(capacity())
        self.engine = new_engine(self.runner)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def ask(self, name: str, prompt: tuple[int, ...]) -> None:
        params = ResolvedSampling(max_tokens=6)
        request = Request(name, prompt, self.engine.info.namespace("group"), 0.0, params, seed=len(self.requests))
        self.requests[name], self.tokens[name] = request, []
        self.engine.submit(request)

    def run(self) -> None:
        while self.engine.has_work:
            self.take(self.engine.step(lambda: 0.0))
        invariants.check_at_rest(self.engine.memory)

    def take(self, events: list[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.tokens[event.request_id].append(event.token_id)
            elif isinstance(event, Finished):
                self.cached[event.request_id] = event.num_cached_tokens

    def is_right(self, name: str) -> bool:
        request = self.requests[name]
        alone = answer_alone(request.prompt, request.params, request.seed, VOCABULARY, has_state=True)
        return self.tokens[name] == alone


@pytest.mark.parametrize("breaks", ["before any copy", "after the last keep"])
def test_everybody_is_right_after_a_torn_step(breaks: str) -> None:
    world = World()
    world.ask("first", SHARED)
    world.run()
    # Both go on behind the same cached state; the second waits for a block that the first computes in this very step,
    # so that its copy is in a plan that has no row of it.
    world.ask("planned", (*SHARED, *range(20, 32)))
    world.ask("waiting", (*SHARED, *range(20, 32)))
    world.runner.breaks = breaks
    with pytest.raises(TornError):
        world.engine.step(lambda: 0.0)
    invariants.check(world.engine.memory)
    assert not world.engine.scheduler.running, "nobody relies on a slot of that step"
    world.run()
    assert world.is_right("first")
    assert world.is_right("waiting")
    assert world.tokens["planned"] == []
    world.ask("later", (*SHARED, *range(20, 32)))
    world.run()
    assert world.is_right("later")
    assert world.cached["waiting"] == 8
    assert world.cached["later"] == 20


@pytest.mark.parametrize("num_slots", [0, 12])
def test_a_model_with_states_is_not_guessed_for(num_slots: int) -> None:
    engine = new_engine(OracleRunner(capacity(num_slots)), StepCost(((1, 0.01), (64, 0.02))))
    assert (engine.scheduler.propose is None) == (num_slots > 0)


def test_fewer_slots_than_may_run_are_refused() -> None:
    assert new_engine(OracleRunner(capacity(5))).memory.config.num_running_slots == 5
    with raises_code(ConfigError, "invalid_config"):
        new_engine(OracleRunner(capacity(4)))
