"""No test fails because something took longer than a second: what must come is waited for at least 20 seconds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
LEAST_S = 20.0
PAUSE_S = 0.25
"""Whoever waits no longer than this looks again afterwards: it is a pause, and nothing is judged by it."""
PLACE = {"wait": 0, "join": 0, "settimeout": 0, "timeout": 0, "wait_until_free": 0, "result": 0, "wait_until": 1,
         "wait_for": 1, "create_connection": 1}  # fmt: skip
"""Where a call that waits takes its seconds, if they have no name."""
NAMES = {"timeout", "within_s"}


def short_waits(source: str) -> Iterator[tuple[int, float]]:
    """Lines that wait for longer than a pause and shorter than a busy machine may need."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for value in _seconds(node):
                if PAUSE_S < value < LEAST_S:
                    yield node.lineno, value


def _seconds(call: ast.Call) -> Iterator[float]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [keyword.value for keyword in call.keywords if keyword.arg in NAMES]
    given += call.args[PLACE[name] : PLACE[name] + 1] if name in PLACE else []
    for value in given:
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
            yield float(value.value)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_what_must_come_is_waited_for(path: Path) -> None:
    assert list(short_waits(path.read_text())) == []


@pytest.mark.parametrize(
    ("line", "is_short"),
    [
        ("event.wait(5)", True),
        ("thread.join(timeout=1.0)", True),
        ("here.wait_until(lambda: True, 3)", True),
        ("asyncio.timeout(2)", True),
        ("subprocess.run([], timeout=10)", True),
        ("event.wait(60)", False),
        ("thread.join(0.01)", False),
        ("', '.join(words)", False),
        ("here.wait_until(lambda: True)", False),
    ],
)
def test_a_short_wait_is_seen(line: str, is_short: bool) -> None:
    assert bool(list(short_waits(line))) is is_short
