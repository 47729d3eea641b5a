"""Measures the steps of an engine under varied loads: few and many sequences, short and long contexts, prefill alone,
mixed with decode, and decode alone.

The load changes with each episode (some steps with a constant number of sequences). Each round shuffles the order of
its episodes, so that a drift of the machine's speed does not affect one kind of step only.
"""

from collections.abc import Callable, Iterator
from random import Random
from time import monotonic, perf_counter

from quire.backends.protocol import PendingStep, Runner
from quire.core.request import Request
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.engine.step_fit import TimedStep
from quire.engine.step_profile import StepLoad

EPISODE_STEPS = 40
MAX_OUTPUT_TOKENS = 48
EPISODE_TOKENS = 8192
"""Limit on the prompt tokens of an episode's concurrent sequences: with more sequences, prompts are shorter."""

MakeLoadRequest = Callable[[int, int], Request]
"""A function (prompt tokens, output tokens) that makes a request whose prompt is not cached."""


class _PlanRecorder:
    """Wraps a runner, and records the plan of its last step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plan: StepPlan | None = None
        self.capacity = runner.capacity
        self.read_blocks, self.write_blocks, self.close = runner.read_blocks, runner.write_blocks, runner.close

    def start(self, plan: StepPlan) -> PendingStep:
        self.plan = plan
        return self._runner.start(plan)


def measure_steps(
    engine: Engine, make: MakeLoadRequest, num_rounds: int, longest_tokens: int, random: Random
) -> list[TimedStep]:
    """Measure steps of an engine without other requests; afterwards the engine is empty again."""
    runner = engine.runner
    recorder = _PlanRecorder(runner)
    engine.runner = recorder
    try:
        return [
            step
            for _ in range(num_rounds)
            for num_running in _shuffled_counts(random, engine.scheduler.config.max_running)
            for step in _episode(engine, recorder, _RequestMix(random, make, num_running, longest_tokens))
        ]
    finally:
        engine.runner = runner


class _RequestMix:
    """The requests of one episode: `num_running` at a time, with prompts of all lengths up to a maximum."""

    def __init__(self, random: Random, make: MakeLoadRequest, num_running: int, longest_tokens: int) -> None:
        self._random = random
        self._make = make
        self.num_running = num_running
        self._longest = max(2, min(longest_tokens - MAX_OUTPUT_TOKENS, EPISODE_TOKENS // num_running))

    def next(self) -> Request:
        """Make a request. Prompt lengths are log-uniform, so that short prompts are as frequent as long ones."""
        num_prompt_tokens = int(self._longest ** self._random.uniform(0.3, 1.0))
        return self._make(max(1, num_prompt_tokens), self._random.randint(2, MAX_OUTPUT_TOKENS))


def _shuffled_counts(random: Random, max_running: int) -> list[int]:
    """Return 1, 2, 4, ... up to `max_running`, in random order."""
    counts = [1 << exponent for exponent in range(max_running.bit_length())]
    random.shuffle(counts)
    return counts


def _episode(engine: Engine, recorder: _PlanRecorder, mix: _RequestMix) -> Iterator[TimedStep]:
    request_ids: set[str] = set()
    num_left = EPISODE_STEPS
    while num_left:
        while len(engine.scheduler.live) < mix.num_running:
            request = mix.next()
            request_ids.add(request.request_id)
            engine.submit(request)
        recorder.plan, began_s = None, perf_counter()
        engine.step(monotonic)
        duration_s = perf_counter() - began_s
        if recorder.plan is not None:
            yield TimedStep(StepLoad.of(recorder.plan), duration_s)
            num_left -= 1
    for request_id in sorted(request_ids & engine.scheduler.live.keys()):
        engine.cancel(request_id)
    while engine.has_work:
        engine.step(monotonic)
