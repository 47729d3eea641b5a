"""When visits begin: plain data."""

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pace:
    """When visits begin."""

    concurrency: int | None = None
    """Closed loop: how many clients. Open loop: how many visits at most at once; those beyond wait in the client."""
    moments_s: tuple[float, ...] | None = None
    """Open loop: when each visit comes, from the start. None: a closed loop."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"expected a concurrency of at least 1, got {self.concurrency}", code="no_concurrency")
        if self.moments_s is None and self.concurrency is None:
            raise ConfigError("expected a concurrency (closed loop) or arrivals (open loop), got neither")
