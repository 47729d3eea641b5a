"""The configuration with which a worker is spawned, and its supervisor's time limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.worker.messages import Open
from quire.worker.parent.spawned_worker import COMMAND


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker counts as stuck, and when the supervisor stops restarting."""

    stuck_s: float = 30.0
    """Longest time without progress (a finished step or layer) before a worker is killed."""
    silent_s: float = 4.5
    """Longest time without expected progress before a worker counts as not ready; below 5 s, so that probes see it."""
    max_restarts_without_progress: int = 5
    """The supervisor gives up after this many consecutive workers without progress."""
    load_s: float = 900.0
    """Longest time without a message while a worker loads."""
    close_s: float = 5.0
    """Longest time for a worker to close."""
    first_delay_s: float = 0.25
    max_delay_s: float = 30.0

    def delay_s(self, num_without_progress: int) -> float:
        """Return the delay before the next worker is spawned (exponential backoff)."""
        return (
            min(self.max_delay_s, self.first_delay_s * 2 ** (num_without_progress - 1)) if num_without_progress else 0.0
        )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything needed to start a worker."""

    open: Open
    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = lambda _label, _done, _total: None
