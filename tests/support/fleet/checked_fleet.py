"""A simulated fleet whose invariants are checked while it runs: of its members and of its gateways' routers."""

from quire.core.inspect import invariants
from quire.errors import InvariantError
from quire.sim.fleet.member_slots import MemberSlot
from quire.sim.fleet.simulation import FleetSimulation
from tests.support.fleet.router_invariants import check_router

CHECK_EVERY_STEPS = 16
"""Steps of a member between two checks of it."""
CHECK_EVERY_MOMENTS = 16
"""The same of gateways."""


class CheckedFleet(FleetSimulation):
    """Raises InvariantError at the first one that does not hold."""

    def process_next_event(self) -> None:
        number = self.event_queue[0][1]
        super().process_next_event()
        if number % CHECK_EVERY_MOMENTS == 0:
            self._check_gateways()

    def begin_step(self, slot: MemberSlot) -> None:
        member = slot.member
        is_between = member is not None and member.step_in_progress is None
        if member is not None and is_between and member.scheduler.stats.num_steps % CHECK_EVERY_STEPS == 0:
            invariants.check(member.memory)
            invariants.check_scheduler(member.scheduler)
        super().begin_step(slot)

    def _check_gateways(self) -> None:
        """Every request is in exactly one place, and gateways account for their own."""
        by_gateway: list[list[str]] = [[] for _ in self.gateways]
        for slot in self.member_slots:
            for name in (*slot.requests, *slot.stranded):
                by_gateway[self._gateway_of[name]].append(name)
        num_known = sum(map(len, by_gateway)) + len(self._waiting)
        if num_known != self.num_open:
            rule = f"check: {self.num_open} requests are open, {num_known} known"
            raise InvariantError(rule, code="requests_miscounted")
        for gateway, names in zip(self.gateways, by_gateway, strict=True):
            check_router(gateway.router, names)
