"""Where a worker publishes KV-cache events, and how they are written."""

from dataclasses import dataclass, replace
from typing import Literal

Encoding = Literal["map", "array"]


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """Where and how cached blocks are announced."""

    endpoint: str
    """Bound if it is a pattern (`tcp://*:5557`), ipc or inproc, or of this machine; else connected to."""
    replay_endpoint: str = ""
    """Where lost batches can be asked for; empty: nowhere."""
    topic: str = ""
    encoding: Encoding = "map"
    num_kept_batches: int = 10_000
    high_water_mark: int = 100_000
    tells_incarnation: bool = False
    """The topic is a new one in each incarnation of a worker: readers see that its numbers begin again."""

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
