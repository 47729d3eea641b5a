"""What a worker is spawned with, and how long its supervisor waits for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.worker.messages import Open
from quire.worker.parent.spawned_worker import COMMAND


@dataclass(frozen=True, slots=True)
class Limits:
    """When a worker counts as stuck, and when as hopeless."""

    stuck_s: float = 30.0
    """A worker may be without progress for this long: no step and no layer of one is done."""
    silent_s: float = 4.5
    """One that would have shown progress, and has not for this long, is not ready: before five seconds are over."""
    max_restarts_without_progress: int = 5
    """After so many consecutive workers without progress, the supervisor gives up."""
    load_s: float = 900.0
    """A worker that loads may be silent for this long."""
    close_s: float = 5.0
    """A worker may take this long to close."""
    first_delay_s: float = 0.25
    max_delay_s: float = 30.0

    def delay_s(self, num_without_progress: int) -> float:
        """How long to wait before the next worker."""
        return (
            min(self.max_delay_s, self.first_delay_s * 2 ** (num_without_progress - 1)) if num_without_progress else 0.0
        )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything a worker needs to begin."""

    open: Open
    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = lambda _label, _done, _total: None
