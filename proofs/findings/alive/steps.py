"""Steps sized by time: the coder, with long prompts beside streams, and what sizing costs.

The engine runs in this process, so that every step is seen with what it fed, by the clock and in processor time: all
threads' together, over their number. Steps that feed no more of prompts than one block are the least there are, and are
not counted. Guesses are off: they would add tokens to steps that nobody sized.
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
LATE = 1.5
NUM_STREAMS = 8
QUIET = 1.15
"""Times the processor time that steps may take by the clock on a machine that is called quiet."""
KEY = bytes(32)


@dataclass(frozen=True, slots=True)
class DoneStep:
    """What a step fed of prompts, and how long it took."""

    num_prompt_tokens: int
    clock_s: float
    processor_s: float


class Coder:
    """The model, one prompt or many at a time."""

    def __init__(self, random: Random) -> None:
        self.engine: Engine = open_engine(resolve(str(coder_file())), SETTINGS, QueueConfig(), KEY)
        self._random = random
        self._num_requests = 0
        self.steps: list[DoneStep] = []
        self.tokens: list[Token] = []

    def size_steps(self, limit_s: float) -> None:
        """From now on so; what was learnt is forgotten."""
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
        fed = 0

        def began(_ids: list[str]) -> None:
            nonlocal fed
            plan = self.engine.scheduler.in_flight
            counts = [] if plan is None else [len(item.token_ids) for item in plan.items]
            fed = sum(count for count in counts if count > 1)

        while self.engine.has_work and not is_over():
            clock_s, processor_s = perf_counter(), process_time()
            told = self.engine.step(monotonic, began)
            took_s = (process_time() - processor_s) / num_threads()
            self.steps.append(DoneStep(fed, perf_counter() - clock_s, took_s))
            self.tokens += [event for event in told if isinstance(event, Token)]

    def whole(self, prompt: tuple[int, ...], max_tokens: int = 1) -> float:
        """Processor seconds until it is answered, from an empty cache."""
        self.engine.clear()
        self.ask(prompt, max_tokens)
        began_s = process_time()
        self.run(lambda: False)
        return process_time() - began_s


def limit_here_s(coder: Coder) -> float:
    """The default; on a machine that takes longer for two blocks, what these take: else every step would be of one
    block, and nothing would be sized."""
    coder.size_steps(0.0)
    coder.steps.clear()
    coder.whole(coder.prompt(3 * SETTINGS.max_step_tokens))
    return max(
        LIMIT_S, *(step.clock_s * 2 * SETTINGS.block_size / SETTINGS.max_step_tokens for step in coder.steps[:3])
    )


def long_prompts_beside_streams(coder: Coder, num_tokens: int) -> list[DoneStep]:
    """The steps that read them."""
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


def answered(coder: Coder, prompt: tuple[int, ...], limit_s: float) -> list[tuple[int, object]]:
    """Its tokens with their log-probabilities."""
    coder.size_steps(limit_s)
    coder.tokens.clear()
    coder.whole(prompt, 8)
    return [(token.token_id, token.logprobs) for token in coder.tokens]


@section("alive steps by time")
def steps_by_time(proof: Proof) -> None:
    coder = Coder(proof.random)
    coder.whole(coder.prompt(600))  # what a first step does once is no step's
    limit_s = limit_here_s(coder)
    coder.size_steps(limit_s)
    steps = long_prompts_beside_streams(coder, proof.sized(quick=600, full=16_000))
    proof.report("steps_limit_ms", limit_s * 1000)
    proof.at_least("steps_counted", len(steps), proof.sized(quick=5, full=50), "else nothing was sized")
    proof.report("steps_median_tokens", median([0, *(step.num_prompt_tokens for step in steps)]))
    late = sum(step.processor_s > LATE * limit_s for step in steps) / max(1, len(steps))
    late_by_clock = sum(step.clock_s > LATE * limit_s for step in steps) / max(1, len(steps))
    proof.at_most("steps_late", late, 0.02, "in processor time")
    slowed = sum(step.clock_s for step in steps) / max(1e-9, sum(step.processor_s for step in steps))
    proof.report("steps_slowed_by_others", slowed)
    if slowed <= QUIET:
        proof.at_most("steps_late_by_clock", late_by_clock, 0.05)
    else:
        say("    the machine is not quiet: by the clock nothing is judged")
        proof.report("steps_late_by_clock", late_by_clock)
    prompt = coder.prompt(330)
    found = [answered(coder, prompt, limit_s) for limit_s in (0.0, LIMIT_S, 0.001)]
    proof.holds("steps_bits_equal", found[0] == found[1] == found[2] and len(found[0]) == 8, "true")


@section("alive speed of sized steps")
def speed_of_sized_steps(proof: Proof) -> None:
    coder, num_tokens = Coder(proof.random), proof.sized(quick=500, full=2_000)
    coder.whole(coder.prompt(600))
    limit_s = limit_here_s(coder)
    proof.report("steps_speed_limit_ms", limit_s * 1000)
    sized = StepSizer(limit_s, SETTINGS.block_size)
    """As a server has learnt it: one for all rounds, and none of them its first."""
    coder.engine.scheduler.sizer = sized
    coder.whole(coder.prompt(num_tokens))

    def measure() -> list[float]:
        seconds: dict[bool, float] = {}
        for is_sized in proof.random.sample([False, True], 2):
            coder.engine.scheduler.sizer = sized if is_sized else StepSizer(0.0, SETTINGS.block_size)
            seconds[is_sized] = coder.whole(coder.prompt(num_tokens))
        return [seconds[False] / seconds[True]]

    (ratios,) = measured_ratios(measure, proof.sized(quick=2, full=0) or None)
    judge_ratio(proof, "steps_speed", ratios, at_least=0.95)
