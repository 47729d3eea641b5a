"""Decoding messages of members takes time of a gateway's event loop: measured, charged to the member, bounded per turn.

    bytes of a member ─► turn: waits while members have used their share of this turn of the loop
                      ─► read ─► charge ─► the budget of `core/work_budget.py` ─► MessageError: the member is dropped
                      ─► passed on to requests ─► count

How long one piece may take is bounded by its bytes where it is read. This bounds how many pieces a turn has, and how
much a member may cost in all. Lives on the event loop; does not inspect bytes.
"""

import asyncio
from time import monotonic, thread_time

from quire.core.work_budget import WorkAccount, WorkBudget, WorkKind
from quire.errors import MessageError

TURN_S = 0.004
"""Processor time: when members have used so much of a turn of the loop, the next piece waits for the next turn."""


class MemberWork:
    """Of all members of one gateway together: they share its loop."""

    def __init__(self) -> None:
        self.budget = WorkBudget()
        self._turn_s = 0.0
        """Spent in this turn of the loop."""

    async def turn(self) -> None:
        """Wait until there is room in a turn."""
        while self._turn_s >= TURN_S:
            await asyncio.sleep(0)

    def charge(self, account: WorkAccount, kind: WorkKind, began_s: float, num_units: int = 1) -> None:
        """A piece was read since this `thread_time`. Raises MessageError if its member is over its budget."""
        seconds = self.count(began_s)
        cut = self.budget.spend(account, kind, seconds, monotonic(), num_units)
        if cut is not None:
            raise MessageError(
                f"expected {cut.kind.value} of up to {cut.limit_s:.2f} s of processor time ({cut.scope.value}), "
                f"got {cut.spent_s:.2f} s"
            )

    def count(self, began_s: float) -> float:
        """Add the time since this `thread_time` to this turn, charged to no member; returns it, in s."""
        seconds = thread_time() - began_s
        if not self._turn_s:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._turn_s += seconds
        return seconds

    def _end_turn(self) -> None:
        self._turn_s = 0.0
