"""Whatever comes and goes: nobody below its share is turned away, and nobody within its share is displaced."""

from collections import Counter
from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.request import PriorityClass
from quire.core.scheduling.shares import (
    ACTIVE_WITHIN_S,
    MIN_SHARE,
    RESERVATION_VALID_S,
    Bounds,
    Denied,
    Granted,
    RetryReservations,
    Shares,
)

KINDS = tuple(one.value for one in PriorityClass)
TENANTS = ("a", "b", "c", "d")


class SharesMachine(RuleBasedStateMachine):
    """Shares and promises beside a list of who holds what, from which everything is counted anew."""

    @initialize(max_places=st.integers(1, 60), num_kept=st.integers(0, 4), weights=st.tuples(*[st.integers(1, 3)] * 4))
    def start(self, max_places: int, num_kept: int, weights: tuple[int, ...]) -> None:
        self.weights = dict(zip(TENANTS, weights, strict=True))
        num_kept = min(num_kept, max_places // 3)
        self.bounds = Bounds(max_places, KINDS, num_kept, {name: float(one) for name, one in self.weights.items()})
        self.shares, self.promises = Shares(self.bounds), RetryReservations()
        self.now_s = 0.0
        self.held: list[tuple[str, str, str | None]] = []
        self.asked_s: dict[str, float] = {}
        self.told_s: dict[str, tuple[float, float]] = {}
        self.number = 0

    # -- the same, counted anew ----------------------------------------------------------------------------------------

    def sharing(self) -> set[str]:
        recent = {tenant for tenant, asked_s in self.asked_s.items() if self.now_s - asked_s < ACTIVE_WITHIN_S}
        return recent | {tenant for _, tenant, _ in self.held}

    def reach(self, kind: str) -> tuple[set[str], int]:
        taken = Counter(one for _, _, one in self.held)
        kinds = {one for one in KINDS if one == kind or taken[one] > self.bounds.num_reserved}
        return kinds, self.bounds.max_places - self.bounds.num_reserved * (len(KINDS) - len(kinds))

    def num_held(self, tenant: str, kinds: set[str]) -> int:
        return sum(owner == tenant and kind in kinds for _, owner, kind in self.held)

    def fair_share(self, tenant: str, limit: int) -> Fraction:
        return Fraction(limit * self.weights[tenant], sum(self.weights[one] for one in self.sharing()))

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(tenant=st.sampled_from(TENANTS), kind=st.sampled_from(KINDS), count=st.integers(1, 12))
    def ask(self, tenant: str, kind: str, count: int) -> None:
        for _ in range(count):
            self.ask_once(tenant, kind)

    def ask_once(self, tenant: str, kind: str) -> None:
        told = self.told_s.pop(tenant, None)
        is_due = told is not None and told[1] <= self.now_s <= told[1] + RESERVATION_VALID_S
        has_reservation = self.promises.redeem(tenant, self.now_s)
        assert has_reservation or not is_due, "it came when it was told to"
        room = self.shares.request_place(tenant, kind, self.now_s, has_reservation=has_reservation)
        self.asked_s[tenant] = self.now_s
        if isinstance(room, Denied):
            assert not has_reservation, "it was promised a place"
            self.check_refused(room, tenant, kind)
            self.promises.reserve(tenant, self.now_s, room.retry_after_s)
            self.told_s[tenant] = (self.now_s, self.now_s + room.retry_after_s)
            assert (tenant, kind) in {(one.tenant, one.kind) for one in self.shares.update_hints()}
        else:
            self.let_in(room, tenant, kind)

    def check_refused(self, room: Denied, tenant: str, kind: str) -> None:
        kinds, limit = self.reach(kind)
        num_held, fair = self.num_held(tenant, kinds), self.fair_share(tenant, limit)
        is_crowded = any(self.fair_share(one, limit) < 1 for one in self.sharing())
        assert num_held >= int(fair) or is_crowded, "a tenant below its share was turned away"
        num_taken = sum(self.num_held(one, kinds) for one in TENANTS)
        assert num_taken >= limit or num_held >= max(MIN_SHARE, int(fair)), "there was room"
        assert (room.state is None) == (self.sharing() == {tenant} or num_held < max(1, int(fair)))
        assert 1 <= room.retry_after_s <= 60

    def let_in(self, room: Granted, tenant: str, kind: str) -> None:
        self.number += 1
        name = f"{tenant}{self.number}"
        kinds, limit = self.reach(kind)
        most = max(MIN_SHARE, int(self.fair_share(tenant, limit)))
        if room.displaced_name is not None:
            self.check_displaced(room.displaced_name, tenant, kind)
            self.shares.give_back(room.displaced_name)
            self.held = [one for one in self.held if one[0] != room.displaced_name]
        if room.has_reservation:
            self.shares.take_promised(name, tenant, self.now_s)
            self.held.append((name, tenant, None))
        else:
            self.shares.take(name, tenant, kind)
            self.held.append((name, tenant, kind))
            assert self.num_held(tenant, kinds) <= most, "it has more than its share"
            self.check_bounds(kind)

    def check_displaced(self, name: str, tenant: str, kind: str) -> None:
        kinds, limit = self.reach(kind)
        above = {one: self.num_held(one, kinds) - max(1, int(self.fair_share(one, limit))) for one in self.sharing()}
        ((at, owner),) = [(at, owner) for at, (one, owner, _) in enumerate(self.held) if one == name]
        assert above[owner] == max(above.values()) > 0, "it was within its tenant's share, or another was further above"
        assert above[tenant] < 0, "it was not below its share"
        newer = [one for one in self.held[at + 1 :] if one[1] == owner and one[2] in kinds]
        assert not newer, "there was a newer one"

    def check_bounds(self, kind: str) -> None:
        taken = Counter(one for _, _, one in self.held)
        num_others = sum(max(taken[one], self.bounds.num_reserved) for one in KINDS if one != kind)
        assert taken[kind] + num_others <= self.bounds.max_places, "there are more than there are places"

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 10_000), is_start=st.booleans())
    def leave(self, pick: int, is_start: bool) -> None:
        name, _, _ = self.held.pop(pick % len(self.held))
        self.shares.give_back(name)
        if is_start:
            self.shares.record_departure(self.now_s)

    @rule(seconds=st.sampled_from((0.5, 1.0, 10.0, 30.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.shares.advance(self.now_s)

    @invariant()
    def all_is_counted(self) -> None:
        if not hasattr(self, "held"):
            return
        assert self.shares.tenants == self.sharing()
        assert len(self.shares) == len(self.held)
        assert self.shares.num_promised == sum(kind is None for _, _, kind in self.held)
        assert self.shares.sharing_weight == sum(self.weights[one] for one in self.sharing())

    @invariant()
    def what_is_said_of_those_turned_away_is_the_rule(self) -> None:
        if not hasattr(self, "held"):
            return
        for one in self.shares.update_hints():
            room = self.shares.judge(one.tenant, one.kind)
            assert one.tenant in self.sharing()
            assert (one.num_room == 0) == isinstance(room, Denied)
            assert one.num_room or one.refusal == room


TestShares = SharesMachine.TestCase
TestShares.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
