"""What loading a model gives, whichever backend does it."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.backends.memory_plan import MemoryPlan
from quire.backends.protocol import Runner

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
