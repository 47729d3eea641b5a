"""One request of a workload: plain data, before any server has seen it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """What a pretended client sends, and when."""

    name: str
    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    tenant: str = "default"
    priority: str = "normal"
    """high, normal or low."""
    num_continuations: int = 1
    timeout_s: float | None = None
