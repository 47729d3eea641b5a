"""The configuration for spawning a worker, and its supervisor's time limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.worker.messages import Open
from quire.worker.parent.spawned_worker import COMMAND


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker counts as stuck, and when the supervisor stops restarting."""

    stuck_s: float = 30.0
    """Longest time without progress (a finished step or layer) before a worker is killed."""
    not_ready_after_s: float = 4.5
    """Longest time without progress, while it is expected, until the worker is reported as not ready (to probes)."""
    max_workers_without_progress: int = 5
    """The supervisor gives up after this many consecutive workers without progress."""
    load_silence_s: float = 900.0
    """Longest time without a message from a loading worker before it is killed."""
    close_s: float = 5.0
    """Longest time for a worker to exit when it is closed, before it is killed."""
    first_delay_s: float = 0.25
    max_delay_s: float = 30.0

    def delay_s(self, num_failed_workers: int) -> float:
        """Return the delay (exponential backoff) before the next worker, after this many workers without progress."""
        return min(self.max_delay_s, self.first_delay_s * 2 ** (num_failed_workers - 1)) if num_failed_workers else 0.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything needed to start a worker."""

    open_message: Open
    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = lambda _label, _done, _total: None
