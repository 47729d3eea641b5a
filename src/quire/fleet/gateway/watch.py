"""What is there to look at where members compute: nothing. Each member's own server shows its pool."""

from collections.abc import Callable, Sequence

from quire.core.inspect.snapshots import EngineSnapshot
from quire.engine.port import TellBlock, WorkerRecord
from quire.errors import EngineDeadError


class FleetWatch:
    """A port through which no pool is seen."""

    workers: Sequence[WorkerRecord] = ()

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """There is nothing to show."""

    def unwatch(self) -> None:
        """There was nothing."""

    def ask_block(self, block_id: int, tell: TellBlock) -> None:
        """Blocks are the members' own."""
        tell(EngineDeadError("this gateway has no blocks; ask a member's own server for its blocks"))
