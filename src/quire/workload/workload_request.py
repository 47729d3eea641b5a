"""One request of a simulated workload, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A simulated client's request and its arrival time."""

    name: str
    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    tenant: str = "default"
    priority: str = "normal"
    """The class: high, normal or low."""
    num_continuations: int = 1
    timeout_s: float | None = None
