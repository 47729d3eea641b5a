"""Settings for publishing KV-cache events."""

from dataclasses import dataclass, replace
from typing import Literal

Encoding = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """Where and how a worker publishes KV-cache events; it keeps the last `num_kept_batches` for repeated requests."""

    endpoint: str
    """Bound if it is a wildcard (`tcp://*:5557`), local, ipc or inproc endpoint; connected to otherwise."""
    replay_endpoint: str = ""
    """Address at which subscribers can request lost batches; empty if they cannot."""
    topic: str = ""
    encoding: Encoding = "map"
    num_kept_batches: int = 10_000
    high_water_mark: int = 100_000
    has_incarnation_topic: bool = False
    """Use a new topic for each worker process, so that subscribers notice that batch numbers restart."""

    def of_worker(self, index: int) -> "KVEventSettings":
        """Return the settings of one worker of a server: workers publish on consecutive ports."""
        return replace(
            self, endpoint=_shift_port(self.endpoint, index), replay_endpoint=_shift_port(self.replay_endpoint, index)
        )


def _shift_port(endpoint: str, index: int) -> str:
    """Return the endpoint with its port increased by `index`, or with `index` appended if it has no port."""
    if not endpoint or not index:
        return endpoint
    stem, _, port = endpoint.rpartition(":")
    return f"{stem}:{int(port) + index}" if port.isdecimal() else f"{endpoint}-{index}"
