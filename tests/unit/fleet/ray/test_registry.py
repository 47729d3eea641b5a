"""The table of members: which are listed, which are forgotten, and what a restarted table lists."""

from quire.fleet.member.status import MemberStatus
from quire.fleet.ray.registry import SETTLE_S, STALE_S, MemberRegistry


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(registry: MemberRegistry, replica: str, state: str = "ready") -> None:
    registry.report(replica, MemberStatus(f"tcp://127.0.0.1:{len(replica)}", state))


def test_a_member_that_reports_is_listed_until_it_leaves_or_drains() -> None:
    registry = MemberRegistry(clock=Clock())
    for one in ("bb", "a"):
        report(registry, one)
    assert registry.addresses() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    report(registry, "a", "draining")
    assert registry.addresses() == ["tcp://127.0.0.1:2"]
    registry.leave("bb")
    registry.leave("bb")
    assert registry.addresses() == []


def test_a_member_without_a_recent_report_is_not_listed() -> None:
    clock = Clock()
    registry = MemberRegistry(clock=clock)
    report(registry, "a")
    clock.now_s = STALE_S / 2
    report(registry, "bb")
    clock.now_s = STALE_S
    assert registry.addresses() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    clock.now_s = STALE_S * 1.25
    assert registry.addresses() == ["tcp://127.0.0.1:2"]


def test_a_restarted_table_lists_no_member_until_all_could_have_reported() -> None:
    clock = Clock()
    registry = MemberRegistry(settle_s=SETTLE_S, clock=clock)
    report(registry, "a")
    assert registry.addresses() == []
    clock.now_s = SETTLE_S
    assert registry.addresses() == ["tcp://127.0.0.1:1"]
