"""Any life of an engine, replayed, plans the same; tokens may have other names; and what is different is found."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import ReplayError
from quire.sim.replay.replay import replay
from tests.support.core.scheduler_changes import CHANGES
from tests.support.workers.traced_engines import write_life

SEEDS = st.integers(0, 1 << 30)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_any_life_replayed_is_the_same(seed: int, has_states: bool, own_tokens: bool) -> None:
    with folder() as at:
        write_life(at / "trace", seed, kept=5 if has_states else None, own_tokens=own_tokens)
        report = replay(at / "trace")
        assert report.is_same, "\n".join(report.lines())
        assert report.num_steps > 0


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_plans_do_not_depend_on_the_names_of_tokens(seed: int) -> None:
    with folder() as at:
        write_life(at / "permuted", seed)
        write_life(at / "own", seed, own_tokens=True)
        assert _plans(at / "permuted") == _plans(at / "own")


def _plans(path: Path) -> list[Any]:
    """Without the drafts, which are tokens; how many there are is counted."""
    plans = [one for one in map(json.loads, path.read_text().splitlines()) if one["is"] == "plan"]
    return [[[*row[:7], len(row[7]), row[8]] for row in plan["rows"]] for plan in plans]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.0, 1.0))
@example(163107, 0.6009521245504058).via("between a header and the end of its line")
def test_a_trace_that_was_cut_off_anywhere_is_replayed_as_far_as_it_goes(seed: int, share: float) -> None:
    with folder() as at:
        write_life(at / "trace", seed, 40)
        write_life(at / "trace", seed + 1, 40)
        data = (at / "trace").read_bytes()
        end = data.index(b"\n") + 1 + int(share * (len(data) - data.index(b"\n") - 1))
        (at / "trace").write_bytes(data[:end])
        report = replay(at / "trace")
        assert report.is_same, "\n".join(report.lines())
        write_life(at / "trace", seed + 2, 40)  # the next life goes on behind it
        longer = replay(at / "trace")
        assert longer.is_same
        assert len(longer.sessions) == len(report.sessions) + 1


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_trace_is_refused_or_replayed_and_nothing_else(seed: int, damage: list[tuple[float, int]]) -> None:
    with folder() as at:
        write_life(at / "trace", seed % 50, 30)
        data = bytearray((at / "trace").read_bytes())
        for share, byte in damage:
            data[int(share * (len(data) - 1))] = byte
        (at / "trace").write_bytes(data)
        with suppress(ReplayError):
            "\n".join(replay(at / "trace").lines())


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_a_plan_that_somebody_changed_is_found_at_its_line(seed: int) -> None:
    random = Random(seed)
    with folder() as at:
        write_life(at / "trace", seed)
        lines = (at / "trace").read_text().splitlines()
        at_plans = [number for number, line in enumerate(lines) if '"is":"plan"' in line and json.loads(line)["rows"]]
        number = random.choice(at_plans)
        plan = json.loads(lines[number])
        row, field = random.choice(plan["rows"]), random.choice((0, 1, 2, 4))
        row[field] = [*row[4], 1] if field == 4 else row[field] + 1
        lines[number] = json.dumps(plan)
        (at / "trace").write_text("\n".join(lines) + "\n")
        (life,) = replay(at / "trace").sessions
        assert life.difference is not None
        assert (life.difference.line, life.difference.kind) == (number + 1, "plan")
        assert life.difference.rows


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lives") / "trace"
    for seed in range(40):
        write_life(path, seed)
    assert replay(path).is_same
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_a_scheduler_of_which_a_rule_was_changed_is_found(
    lives: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, name, changed = CHANGES[change]
    monkeypatch.setattr(room, name, changed)
    report = replay(lives)
    assert not report.is_same
    assert "recorded" in "\n".join(report.lines())
