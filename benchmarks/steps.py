"""Builds real engines with a given number of sequences at a given context, ready for their next step, within seconds.

The time of a step does not depend on how its context was computed. So contexts are not computed here: every block of
the store is filled with the keys and values of a real text, and prompts count as computed. Everything after that is
real: the plan, the kernels over that many blocks, the sampler, the apply.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median

from tokenizers import Tokenizer

from benchmarks.record import ROOT
from benchmarks.test_model import smollm2
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.kv_store import KVStore
from quire.backends.cpu.load import load_model
from quire.backends.cpu.runner import CpuRunner
from quire.backends.cpu.state_store import StateStore
from quire.backends.kernels.threads import use_threads
from quire.backends.protocol import Capacity, PendingStep
from quire.checkpoints.families import read_shape
from quire.config import Dtype, ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.step import NO_MASKS, Masks, RowResult, StepPlan, StepResult, WorkItem
from tests.support.models.models import Ask, Machine

BLOCK = 32
GIB = 1 << 30
MAX_STEP_TOKENS = 512
MAX_SEQUENCE_TOKENS = 4096
TEMPLATE_BLOCKS = 32
"""The number of blocks of real text, which are copied over the whole store."""
NUM_SLOTS = 5 * 64 + 1
"""State slots of models with recurrent layers; unused ones take no memory."""
OWN_TOKENS = 400
"""The number of tokens that a sequence may decode."""

Times = dict[str, list[float]]
"""Seconds of each round, by the name of the call."""


@cache
def real_text() -> list[int]:
    """Return this project's pages and code as tokens of the test model."""
    tokenizer = Tokenizer.from_file(str(smollm2().tokenizer_file))
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")])
    return tokenizer.encode("\n".join(file.read_text() for file in files)).ids


def load_smollm2(dtype: Dtype = "float32") -> Decoder:
    """The test model on the CPU backend."""
    settings = ModelSettings(max_step_tokens=MAX_STEP_TOKENS, max_sequence_tokens=MAX_SEQUENCE_TOKENS, dtype=dtype)
    use_threads(None)
    return load_model(smollm2(), settings, 12 * GIB, lambda _done, _total: None)


@cache
def smollm2_model() -> Decoder:
    """The test model, loaded once: runners share it and have their own stores."""
    return load_smollm2()


def make_store(model: Decoder, num_blocks: int, dtype: Dtype = "float32") -> KVStore:
    return KVStore(model.kv_shapes, num_blocks, BLOCK, dtype)


def make_runner(model: Decoder, store: KVStore) -> CpuRunner:
    num_slots = NUM_SLOTS if model.slot_size else 0
    capacity = Capacity(
        store.num_blocks,
        BLOCK,
        MAX_SEQUENCE_TOKENS,
        MAX_STEP_TOKENS,
        model.vocabulary_size,
        store.num_block_bytes,
        num_slots,
    )
    return CpuRunner(model, store, capacity, StateStore(model.slot_size, num_slots) if num_slots else None)


class PrimedRunner:
    """A runner whose blocks all contain keys and values of real text; while `is_filling`, nothing is computed."""

    def __init__(self, model: Decoder, num_blocks: int, dtype: Dtype = "float32") -> None:
        store = make_store(model, num_blocks, dtype)
        self._runner = make_runner(model, store)
        self.capacity = self._runner.capacity
        self.is_filling = True
        _prime(self._runner, store)

    def start(self, plan: StepPlan) -> PendingStep:
        return _UncomputedStep(plan) if self.is_filling else self._runner.start(plan)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        return self._runner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._runner.write_blocks(block_ids, data)

    def close(self) -> None:
        self._runner.close()


def _prime(runner: CpuRunner, store: KVStore) -> None:
    table, text = tuple(range(1, TEMPLATE_BLOCKS + 1)), real_text()[: TEMPLATE_BLOCKS * BLOCK]
    for first in range(0, len(text), MAX_STEP_TOKENS):
        item = WorkItem(0, tuple(text[first : first + MAX_STEP_TOKENS]), first, table, state_slot=1)
        runner.run(StepPlan(0, (), (item,)))
    for array in (*store.keys, *store.values):
        for first in range(1 + TEMPLATE_BLOCKS, len(array), TEMPLATE_BLOCKS):
            rest = array[first : first + TEMPLATE_BLOCKS]
            rest[...] = array[1 : 1 + len(rest)]


class _UncomputedStep:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def wait(self, _masks: Masks = NO_MASKS) -> StepResult:
        rows = {
            item.sequence_id: RowResult(item.token_ids[-1:] if item.sampling is not None else ())
            for item in self._plan.items
        }
        return StepResult(self._plan.step, rows)


def decoding(
    model: Decoder,
    num_rows: int,
    context: int,
    *,
    shared: int = 0,
    dtype: Dtype = "float32",
    computes: bool = True,
) -> Machine:
    """Return an engine in which so many greedy sequences of this length decode; `shared` tokens are common to all. With
    `computes=False` steps return at once, so that only the host's part is left."""
    text, greedy = real_text(), ResolvedSampling(temperature=0.0, max_tokens=OWN_TOKENS)
    own_texts = [text[1_000 * (row + 1) :][: context - shared] for row in range(num_rows)]
    return filled(model, [Ask([*text[:shared], *own_text], greedy) for own_text in own_texts], dtype, computes=computes)


def filled(model: Decoder, asks: Sequence[Ask], dtype: Dtype, *, computes: bool = True) -> Machine:
    """Return an engine that decodes these requests, with their prompts computed."""
    num_blocks = 64 + sum(-(-(len(ask.prompt) + OWN_TOKENS) // BLOCK) for ask in asks)
    runner = PrimedRunner(model, num_blocks, dtype)
    machine = Machine(runner, max_running=64, max_step_tokens=MAX_STEP_TOKENS)
    for ask in asks:
        machine.submit(ask)
    running = machine.engine.scheduler.running
    while len(running) < len(asks) or any(one.num_uncomputed > 1 for one in running):
        machine.step()
    runner.is_filling = not computes
    machine.step()
    return machine


def kv_bytes(num_rows: int, context: int) -> int:
    """Return the bytes of keys and values that a step of the test model reads, in float32."""
    shape = read_shape(smollm2().config)
    return num_rows * context * 2 * shape.kv_size * shape.num_layers * 4


# -- clocks ------------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def interleave(calls: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Time the calls in alternation, after one warm-up round."""
    times: Times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return times


def fastest(times: Times, names: Sequence[str]) -> list[float]:
    """Return the times of the operator with the smallest median."""
    return min((times[name] for name in names), key=median)
