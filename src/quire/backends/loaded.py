"""The result of loading a model, the same for every backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.backends.memory_plan import MemoryPlan
from quire.backends.protocol import Capacity, Runner
from quire.config import ModelSettings
from quire.core.scheduling.step_cost import StepCost
from quire.errors import CheckpointError

OnRead = Callable[[int, int], None]
"""Progress callback: bytes read so far, total bytes."""


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A loaded runner, its memory plan, and facts about it for logs and for cache compatibility."""

    runner: Runner
    memory_plan: MemoryPlan
    load_peak_bytes: int
    """Peak resident bytes of the process while it loaded the model, before the first measured step."""
    kv_layout: str
    """Name of the layout of keys and values in a block. Blocks of different layouts are never interchangeable."""
    notes: tuple[str, ...]
    exactness: str = ""
    """Everything that affects result bits apart from model and settings, such as instruction set and versions. Empty
    means unknown: results are then not assumed bit-identical to those of any other runner."""
    step_cost: StepCost | None = None
    """Measured step cost by number of tokens; None if not measured. The scheduler uses it to decide how many draft
    tokens are worth checking."""


def capacity_of(plan: MemoryPlan, settings: ModelSettings, vocabulary_size: int, num_kv_bytes: int) -> Capacity:
    """Return the capacity of a runner with this memory plan and this number of bytes per block."""
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
    """Convert errors that a damaged model causes in libraries into a CheckpointError with a message of one sentence."""
    try:
        yield
    except (RuntimeError, IndexError, ArithmeticError, MemoryError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{name} cannot run with its config.json: {text}; download the model again") from error
