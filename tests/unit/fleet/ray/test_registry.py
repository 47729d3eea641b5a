"""The table of members: who is listed, who is forgotten, and what a table says that has to begin anew."""

from quire.fleet.member.status import MemberStatus
from quire.fleet.ray.registry import SETTLES_S, STALE_S, MemberRegistry, MemberRow


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def row(replica: str, state: str = "ready") -> MemberRow:
    return MemberRow(replica, "node", 1, MemberStatus(f"tcp://127.0.0.1:{len(replica)}", state))


def test_who_reports_is_listed_until_it_leaves_or_drains() -> None:
    registry = MemberRegistry(clock=Clock())
    for one in ("bb", "a"):
        registry.report(row(one))
    assert registry.addresses() == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    registry.report(row("a", "draining"))
    assert registry.addresses() == ["tcp://127.0.0.1:2"]
    assert [one.replica for one in registry.rows()] == ["a", "bb"]
    registry.leave("bb")
    registry.leave("bb")
    assert registry.addresses() == []


def test_who_is_not_heard_of_any_more_is_forgotten() -> None:
    clock = Clock()
    registry = MemberRegistry(clock=clock)
    registry.report(row("a"))
    clock.now_s = STALE_S / 2
    registry.report(row("bb"))
    clock.now_s = STALE_S
    assert [(one.replica, one.silent_s) for one in registry.rows()] == [("a", STALE_S), ("bb", STALE_S / 2)]
    clock.now_s = STALE_S * 1.25
    assert registry.addresses() == ["tcp://127.0.0.1:2"]


def test_a_table_that_begins_anew_lists_nobody_until_all_could_have_reported() -> None:
    clock = Clock()
    registry = MemberRegistry(settles_s=SETTLES_S, clock=clock)
    registry.report(row("a"))
    assert registry.addresses() == []
    assert len(registry.rows()) == 1
    clock.now_s = SETTLES_S
    assert registry.addresses() == ["tcp://127.0.0.1:1"]
