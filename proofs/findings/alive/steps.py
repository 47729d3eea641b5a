"""Steps sized by time: a coder model reads long prompts beside streams; are steps short enough, and what does it cost?

The engine runs in this process, so we know the tokens of every step, its time by the clock, and its processor time:
that of all threads, over their number. Steps with at most one block of prompt tokens cannot be smaller, and are
not counted. Speculation is off, because it would add tokens to steps after they were sized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median
from time import monotonic, perf_counter, process_time

from benchmarks.packaged_models import coder_file
from benchmarks.record import say
from benchmarks.rounds import measured_ratios
from proofs.framework.proof import Proof, section
from proofs.framework.rounds import judge_ratio
from quire.backends.kernels.threads import num_threads
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.events import Token
from quire.core.request import Request, ResolvedSampling
from quire.core.scheduling.step_size import StepSizer
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine.engine import Engine
from quire.engine.loading import open_engine

SETTINGS = ModelSettings(max_running=16, max_sequence_tokens=17_000, speculation="off")
LIMIT_S = SETTINGS.step_ms / 1000
LATE_RATIO = 1.5
NUM_STREAMS = 8
MAX_QUIET_RATIO = 1.15
"""A machine is quiet if steps take at most so many times their processor time by the clock."""
KEY = bytes(32)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """How many prompt tokens a step fed, and how long it took."""

    num_prompt_tokens: int
    clock_s: float
    processor_s: float


class Coder:
    """An engine with the coder model, whose steps are measured."""

    def __init__(self, random: Random) -> None:
        self.engine: Engine = open_engine(resolve(str(coder_file())), SETTINGS, QueueConfig(), KEY)
        self._random = random
        self._num_requests = 0
        self.steps: list[MeasuredStep] = []
        self.tokens: list[Token] = []

    def size_steps(self, limit_s: float) -> None:
        """Size steps by this limit from now on, with a new `StepSizer` that has learnt nothing."""
        self.engine.scheduler.sizer = StepSizer(limit_s, SETTINGS.block_size)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1000, 50_000) for _ in range(num_tokens))

    def ask(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        self._num_requests += 1
        name, namespace = f"r{self._num_requests}", self.engine.info.namespace("proof")
        params = ResolvedSampling(max_tokens=max_tokens, temperature=0.0, logprobs=1)
        self.engine.submit(Request(name, prompt, namespace, monotonic(), params))
        return name

    def run(self, is_over: Callable[[], bool]) -> None:
        num_fed = 0

        def on_start(_ids: list[str]) -> None:
            nonlocal num_fed
            plan = self.engine.scheduler.in_flight
            counts = [] if plan is None else [len(item.token_ids) for item in plan.items]
            num_fed = sum(count for count in counts if count > 1)

        while self.engine.has_work and not is_over():
            clock_s, processor_s = perf_counter(), process_time()
            events = self.engine.step(monotonic, on_start)
            used_s = (process_time() - processor_s) / num_threads()
            self.steps.append(MeasuredStep(num_fed, perf_counter() - clock_s, used_s))
            self.tokens += [event for event in events if isinstance(event, Token)]

    def answer(self, prompt: tuple[int, ...], max_tokens: int = 1) -> float:
        """Answer a prompt with an empty cache; returns the processor seconds."""
        self.engine.clear()
        self.ask(prompt, max_tokens)
        start_s = process_time()
        self.run(lambda: False)
        return process_time() - start_s


def limit_of_this_machine_s(coder: Coder) -> float:
    """The default limit, or the time for two blocks if that is longer: otherwise every step would have one block, and
    nothing would be sized."""
    coder.size_steps(0.0)
    coder.steps.clear()
    coder.answer(coder.prompt(3 * SETTINGS.max_step_tokens))
    return max(
        LIMIT_S, *(step.clock_s * 2 * SETTINGS.block_size / SETTINGS.max_step_tokens for step in coder.steps[:3])
    )


def long_prompts_beside_streams(coder: Coder, num_tokens: int) -> list[MeasuredStep]:
    """Read two long prompts beside streams; returns the steps with more than one block of prompt tokens."""
    coder.tokens.clear()
    streams = [coder.ask(coder.prompt(40), 10_000) for _ in range(NUM_STREAMS)]
    coder.run(lambda: len({token.request_id for token in coder.tokens}) == NUM_STREAMS)
    coder.steps.clear()
    prompts = [coder.ask(coder.prompt(num_tokens), 1) for _ in range(2)]
    coder.run(lambda: not any(name in coder.engine.scheduler.live for name in prompts))
    for name in streams:
        coder.engine.cancel(name)
    coder.run(lambda: False)
    return [step for step in coder.steps if step.num_prompt_tokens > SETTINGS.block_size]


def tokens_of_answer(coder: Coder, prompt: tuple[int, ...], limit_s: float) -> list[tuple[int, object]]:
    """The tokens of the answer to a prompt, with their log-probabilities."""
    coder.size_steps(limit_s)
    coder.tokens.clear()
    coder.answer(prompt, max_tokens=8)
    return [(token.token_id, token.logprobs) for token in coder.tokens]


@section("alive steps by time")
def steps_by_time(proof: Proof) -> None:
    coder = Coder(proof.random)
    coder.answer(coder.prompt(600))  # warm-up
    limit_s = limit_of_this_machine_s(coder)
    coder.size_steps(limit_s)
    steps = long_prompts_beside_streams(coder, proof.sized(quick=600, full=16_000))
    proof.report("steps_limit_ms", limit_s * 1000)
    proof.at_least("steps_counted", len(steps), proof.sized(quick=5, full=50), "otherwise nothing was sized")
    proof.report("steps_median_tokens", median([0, *(step.num_prompt_tokens for step in steps)]))
    late_share = sum(step.processor_s > LATE_RATIO * limit_s for step in steps) / max(1, len(steps))
    late_by_clock = sum(step.clock_s > LATE_RATIO * limit_s for step in steps) / max(1, len(steps))
    proof.at_most("steps_late", late_share, 0.02, "in processor time")
    slowdown = sum(step.clock_s for step in steps) / max(1e-9, sum(step.processor_s for step in steps))
    proof.report("steps_slowed_by_others", slowdown)
    if slowdown <= MAX_QUIET_RATIO:
        proof.at_most("steps_late_by_clock", late_by_clock, 0.05)
    else:
        say("    the machine is not quiet: times by the clock are not judged")
        proof.report("steps_late_by_clock", late_by_clock)
    prompt = coder.prompt(330)
    first, *rest = [tokens_of_answer(coder, prompt, limit_s) for limit_s in (0.0, LIMIT_S, 0.001)]
    proof.holds("steps_bits_equal", rest == [first, first] and len(first) == 8, "true")


@section("alive speed of sized steps")
def speed_of_sized_steps(proof: Proof) -> None:
    coder, num_tokens = Coder(proof.random), proof.sized(quick=500, full=2_000)
    coder.answer(coder.prompt(600))
    limit_s = limit_of_this_machine_s(coder)
    proof.report("steps_speed_limit_ms", limit_s * 1000)
    sizer = StepSizer(limit_s, SETTINGS.block_size)
    # All rounds use the same sizer, which learns before the first round, as in a server that has run for a while.
    coder.engine.scheduler.sizer = sizer
    coder.answer(coder.prompt(num_tokens))

    def measure() -> list[float]:
        seconds: dict[bool, float] = {}
        for is_sized in proof.random.sample([False, True], 2):
            coder.engine.scheduler.sizer = sizer if is_sized else StepSizer(0.0, SETTINGS.block_size)
            seconds[is_sized] = coder.answer(coder.prompt(num_tokens))
        return [seconds[False] / seconds[True]]

    (ratios,) = measured_ratios(measure, proof.sized(quick=2, full=0) or None)
    judge_ratio(proof, "steps_speed", ratios, at_least=0.95)
