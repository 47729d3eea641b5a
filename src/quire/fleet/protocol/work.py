"""Limits the CPU time that members' messages take on a gateway's event loop, per loop iteration and per member.

    message of a member ─► turn: waits while members have used up this iteration of the loop
                        ─► parse ─► charge ─► budget of `core/work_budget.py` ─► MessageError: the member is dropped
                        ─► pass on to requests ─► count

The parsers bound the time of one piece by its bytes. `MemberWork` bounds the number of pieces per loop iteration and
the total time per member. It runs on the event loop and does not read the messages.
"""

import asyncio
from time import monotonic, thread_time

from quire.core.work_budget import WorkAccount, WorkBudget, WorkKind
from quire.errors import MessageError

TURN_S = 0.004
"""CPU time for members per loop iteration; after that, the next piece waits for the next iteration."""


class MemberWork:
    """The CPU-time limits for all members of one gateway, which share its event loop."""

    def __init__(self) -> None:
        self.budget = WorkBudget()
        self._turn_s = 0.0
        """CPU time spent in this loop iteration."""

    async def wait_for_turn(self) -> None:
        """Wait for a loop iteration with time left."""
        while self._turn_s >= TURN_S:
            await asyncio.sleep(0)

    def charge(self, account: WorkAccount, kind: WorkKind, began_s: float, num_units: int = 1) -> None:
        """Charge the CPU time since `began_s` (`thread_time`). Raises MessageError if the member exceeds its budget."""
        seconds = self.count_time(began_s)
        excess = self.budget.spend(account, kind, seconds, monotonic(), num_units)
        if excess is not None:
            raise MessageError(
                f"expected {excess.kind} to take at most {excess.limit_s:.2f} s of processor time ({excess.scope}), "
                f"got {excess.spent_s:.2f} s"
            )

    def count_time(self, began_s: float) -> float:
        """Add the CPU time since `began_s` (`thread_time`) to this loop iteration, but to no member; return it."""
        seconds = thread_time() - began_s
        if not self._turn_s:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._turn_s += seconds
        return seconds

    def _end_turn(self) -> None:
        self._turn_s = 0.0
