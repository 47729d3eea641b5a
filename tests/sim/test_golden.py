"""Runs recorded before results could carry several tokens: ordinary requests go on exactly as they did, to the bit."""

import json
from pathlib import Path

from tests.support.traces import traces

GOLDEN = Path(__file__).with_name("golden.json")


def test_ordinary_requests_are_planned_and_answered_as_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text())
    assert traces() == recorded
