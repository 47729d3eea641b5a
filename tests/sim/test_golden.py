"""Runs recorded before results could carry several tokens: ordinary requests go on exactly as they did, to the bit."""

from tests.support.workers.traces import recorded, traces


def test_ordinary_requests_are_planned_and_answered_as_recorded() -> None:
    expected = recorded()
    assert len(expected) >= 20
    assert traces() == expected
