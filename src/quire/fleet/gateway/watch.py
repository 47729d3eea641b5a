"""Inspection of a gateway: it has no pool of its own; each member's own server shows one."""

from collections.abc import Callable, Sequence

from quire.core.inspect.snapshots import EngineSnapshot
from quire.engine.port import OnBlock, WorkerRecord
from quire.errors import EngineDeadError


class FleetWatch:
    """A port without a pool to inspect."""

    workers: Sequence[WorkerRecord] = ()

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Nothing to show."""

    def unwatch(self) -> None:
        """Nothing was shown."""

    def request_block(self, block_id: int, on_block: OnBlock) -> None:
        """Blocks are the members' own."""
        on_block(EngineDeadError("a gateway has no KV blocks; query a member's own server"))
