"""A real model behind the real scheduler, driven by hand: what tests and proofs of backends share."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.kv_store import KVStore
from quire.backends.cpu.runner import CpuRunner
from quire.backends.cpu.state_store import StateStore
from quire.backends.load import load_backend
from quire.backends.protocol import PendingStep, Runner
from quire.checkpoints import resolve
from quire.config import ModelSettings
from quire.core.events import Finished, Refused, SequenceFinished, Token
from quire.core.inspect import invariants
from quire.core.request import Continuation, Request, ResolvedSampling
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import StepPlan, TokenLogprobs
from quire.engine.engine import Engine, ModelIdentity

GREEDY = ResolvedSampling(temperature=0.0)


def load_runner(model: str | Path, **settings: object) -> Runner:
    """A runner with a pool of its own."""
    return load_backend(resolve(str(model)), ModelSettings(**settings)).runner  # type: ignore[arg-type]


def runners_of(model: str | Path, **settings: object) -> Callable[[], Runner]:
    """Makes runners, each with a pool of its own, over one model that is loaded once."""
    first = load_runner(model, **settings)
    capacity = first.capacity
    if isinstance(first, CpuRunner):
        decoder, blocks = opened(first)
        shape = (capacity.num_blocks, capacity.block_size, blocks.dtype)

        def made() -> Runner:
            states = StateStore(decoder.slot_size, capacity.num_slots) if capacity.num_slots else None
            return CpuRunner(decoder, KVStore(decoder.kv_shapes, *shape), capacity, states)

        return made
    if type(first).__name__ == "MlxRunner":
        from tests.support.models.mlx_models import mlx_runners  # noqa: PLC0415 - where MLX is not needed

        return mlx_runners(first)
    return _torch_runners(first)


def opened(runner: Runner) -> tuple[Decoder, KVStore]:
    """The model and the store of a runner of the CPU backend, for tests that feed them by hand."""
    assert isinstance(runner, CpuRunner)
    return runner._opened()


def _torch_runners(first: Runner) -> Callable[[], Runner]:
    from quire.backends.torch.kv_store import KVStore as TorchStore  # noqa: PLC0415 - where torch is not needed
    from quire.backends.torch.runner import TorchRunner  # noqa: PLC0415

    assert isinstance(first, TorchRunner)
    (model, pool), capacity = first._opened(), first.capacity
    shape = (capacity.num_blocks, capacity.block_size, pool.dtype, pool.keys[0].device)
    return lambda: TorchRunner(model, TorchStore(model.kv_shapes, *shape), capacity)


@dataclass
class Ask:
    """What to ask, and later the answers."""

    prompt: Sequence[int]
    params: ResolvedSampling
    seed: int = 0
    n: int = 1
    answers: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.answers[0]


class WatchedRunner:
    """Passes plans on and keeps them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.capacity = runner.capacity
        self.plans: list[StepPlan] = []

    def start(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        return self._runner.start(plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._runner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._runner.write_blocks(block_ids, data)

    def close(self) -> None:
        """The runner belongs to whoever made it."""


class Machine:
    """An engine with an empty cache on a runner that others may have used before."""

    def __init__(self, runner: Runner, **settings: object) -> None:
        defaults = {"max_step_tokens": runner.capacity.max_step_tokens, "max_running": 32}
        config = SchedulerConfig(**{**defaults, **settings})  # type: ignore[arg-type]
        self.runner = WatchedRunner(runner)
        self.engine = Engine(self.runner, config, ModelIdentity("model", "layout"), bytes(32))
        self.now_s = 0.0
        self._asked: dict[str, Ask] = {}

    @property
    def asks(self) -> list[Ask]:
        """All that was asked so far."""
        return list(self._asked.values())

    def submit(self, ask: Ask) -> str:
        name = f"r{len(self._asked)}"
        self._asked[name] = ask
        ask.answers, ask.logprobs = {index: [] for index in range(ask.n)}, {index: [] for index in range(ask.n)}
        continuations = tuple(Continuation(index) for index in range(ask.n))
        told = self.engine.submit(
            Request(
                name,
                tuple(ask.prompt),
                self.engine.info.namespace("group"),
                self.now_s,
                ask.params,
                ask.seed,
                continuations=continuations,
            )
        )
        if isinstance(told, Refused):
            raise told.error
        return name

    def step(self) -> None:
        self.now_s += 1.0
        for event in self.engine.step(lambda: self.now_s):
            match event:
                case Token():
                    self._asked[event.request_id].answers[event.sequence_index].append(event.token_id)
                    self._asked[event.request_id].logprobs[event.sequence_index].append(event.logprobs)
                case SequenceFinished(error=str(error)):
                    self._asked[event.request_id].errors.append(error)
                case Finished():
                    self._asked[event.request_id].num_cached_tokens = event.num_cached_tokens

    def run(self, asks: Sequence[Ask], between: Callable[[], None] = lambda: None) -> list[Ask]:
        """All of them together, until each has its answer; `between` is called after every step."""
        for ask in asks:
            self.submit(ask)
        while self.engine.has_work:
            self.step()
            between()
        invariants.check_at_rest(self.engine.memory)
        return list(asks)

    def alone(self, ask: Ask) -> Ask:
        return self.run([ask])[0]


def random_params(random: random.Random, max_tokens: int) -> ResolvedSampling:
    """Sampled, with some of everything."""
    return ResolvedSampling(
        max_tokens=max_tokens,
        temperature=random.choice([0.5, 0.8, 1.0, 1.3]),
        top_k=random.choice([0, 0, 5, 40]),
        top_p=random.choice([1.0, 0.95, 0.7]),
        min_p=random.choice([0.0, 0.0, 0.05]),
        repetition_penalty=random.choice([1.0, 1.0, 1.2]),
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        frequency_penalty=random.choice([0.0, 0.0, 0.3]),
        logit_bias=random.choice([(), (), ((7, 1.5), (11, -2.0))]),
    )


def texts_of(random: random.Random, tokens: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Pieces of a long tokenised text, each of a given length."""
    starts = [random.randrange(len(tokens) - length) for length in lengths]
    return [list(tokens[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
