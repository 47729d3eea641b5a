"""What loading a model gives, whichever backend does it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.backends.memory_plan import MemoryPlan
from quire.backends.protocol import Capacity, Runner
from quire.config import ModelSettings
from quire.core.scheduling.step_cost import StepCost
from quire.errors import CheckpointError

OnRead = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in all."""


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, and what a person should know about it."""

    runner: Runner
    plan: MemoryPlan
    load_peak_bytes: int
    """The most the process had held when the model was loaded and before a step was measured."""
    kv_layout: str
    """How keys and values lie in a block: blocks of two layouts are never the same block."""
    notes: tuple[str, ...]
    exactness: str = ""
    """What decides the bits of its results beside the model and the settings: instruction set, versions. Empty:
    unknown, and it equals no other."""
    step_cost: StepCost | None = None
    """What steps take by their tokens, where it was measured: by it a scheduler knows which guesses pay."""


def capacity_of(plan: MemoryPlan, settings: ModelSettings, vocabulary_size: int, num_kv_bytes: int) -> Capacity:
    """What a runner can hold by this plan; its blocks have so many bytes each."""
    return Capacity(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_sequence_tokens=plan.max_sequence_tokens,
        max_step_tokens=settings.max_step_tokens,
        vocabulary_size=vocabulary_size,
        num_kv_bytes=num_kv_bytes,
        num_slots=plan.num_slots,
    )


@contextmanager
def as_checkpoint_error(name: str) -> Iterator[None]:
    """Whatever error a damaged model causes in a library becomes one sentence for the operator."""
    try:
        yield
    except (RuntimeError, IndexError, ArithmeticError, MemoryError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{name} cannot run with its config.json: {text}; download the model again") from error
