"""What loading a model gives, whichever backend does it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.backends.memory_plan import MemoryPlan
from quire.backends.protocol import Runner
from quire.core.step_cost import StepCost
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
    step_cost: StepCost | None = None
    """What steps take by their tokens, where it was measured: by it a scheduler knows which guesses pay."""


@contextmanager
def told_in_words(name: str) -> Iterator[None]:
    """Whatever a damaged model makes a library say, the person is told in one sentence."""
    try:
        yield
    except (RuntimeError, IndexError, ArithmeticError, MemoryError) as error:
        told = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{name} cannot be run as its config.json says: {told}; download the model again"
        ) from error
