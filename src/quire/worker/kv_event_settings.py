"""Where a worker publishes KV-cache events, and how they are encoded."""

from dataclasses import dataclass, replace
from typing import Literal

Encoding = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """Where and how cached blocks are announced."""

    endpoint: str
    """Bound if it is a pattern (`tcp://*:5557`), ipc or inproc, or of this machine; else connected to."""
    replay_endpoint: str = ""
    """Where lost batches can be requested; empty: nowhere."""
    topic: str = ""
    encoding: Encoding = "map"
    num_kept_batches: int = 10_000
    high_water_mark: int = 100_000
    has_incarnation_topic: bool = False
    """Each incarnation of a worker has a topic of its own: readers see that its numbers restart."""

    def of_worker(self, index: int) -> "KVEventSettings":
        """Several workers of one server announce on consecutive ports."""
        return replace(
            self, endpoint=_shifted(self.endpoint, index), replay_endpoint=_shifted(self.replay_endpoint, index)
        )


def _shifted(endpoint: str, index: int) -> str:
    """The same address for the first; for others another port, or another name."""
    if not endpoint or not index:
        return endpoint
    stem, _, port = endpoint.rpartition(":")
    return f"{stem}:{int(port) + index}" if port.isdecimal() else f"{endpoint}-{index}"
