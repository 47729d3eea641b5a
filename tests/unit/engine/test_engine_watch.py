"""What an engine shows while somebody looks: how often, at what cost to a step, and what it says of steps."""

import pytest

from quire.core.inspect import pool_map as pool_picture
from quire.core.inspect import tree_map as tree_picture
from quire.core.inspect.snapshots import MAX_STEPS_SHOWN, EngineSnapshot, StepFigures
from quire.core.request import Request, ResolvedSampling
from quire.engine import engine_watch
from quire.engine.engine import Engine
from tests.support.servers.talkers import talker

PERIOD_S = 0.4


class Ticking:
    """A clock that goes on by so much whenever it is read."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def asked(engine: Engine, name: str, num_prompt: int = 10, max_tokens: int = 1000) -> None:
    space = engine.info.namespace("tenant:someone")
    prompt = tuple(7 + at % 5 for at in range(num_prompt))
    request = Request(name, prompt, space, 0.0, ResolvedSampling(max_tokens=max_tokens), tenant="someone")
    engine.submit(request)


@pytest.fixture
def engine() -> Engine:
    return talker(num_blocks=600).engine


def watched(engine: Engine) -> list[EngineSnapshot]:
    shown: list[EngineSnapshot] = []
    engine.begin_watch(PERIOD_S, shown.append)
    return shown


def test_snapshots_come_once_a_period_however_many_steps_there_are(engine: Engine) -> None:
    shown, clock = watched(engine), Ticking()
    asked(engine, "a")
    for _ in range(100):
        clock.now_s += 0.05
        engine.step(clock)
    assert len(shown) == pytest.approx(5 / PERIOD_S, abs=1)
    assert engine.num_snapshots == len(shown)
    assert all(len(one.steps) in (8, 9) for one in shown[1:])


def test_nothing_is_made_before_anybody_looks_nor_after(engine: Engine) -> None:
    clock = Ticking(0.1)
    asked(engine, "a")
    for _ in range(20):
        engine.step(clock)
    assert engine.num_snapshots == 0
    shown = watched(engine)
    for _ in range(20):
        engine.step(clock)
    assert engine.num_snapshots == len(shown) > 0
    engine.end_watch()
    for _ in range(20):
        engine.step(clock)
    assert engine.num_snapshots == len(shown)
    assert engine.watch is None


def test_a_snapshot_tells_each_step_once_and_what_it_computed(engine: Engine) -> None:
    shown, clock = watched(engine), Ticking()
    asked(engine, "a", num_prompt=10, max_tokens=9)
    asked(engine, "b", num_prompt=70, max_tokens=9)
    steps: list[StepFigures] = []
    for _ in range(400):
        clock.now_s += 0.03
        engine.step(clock)
    clock.now_s += 1
    assert engine.watch is not None
    engine.watch.work(clock)
    for one in shown:
        steps += one.steps
        assert len(one.steps) <= MAX_STEPS_SHOWN
    assert [one.step for one in steps] == list(range(1, engine.scheduler.stats.num_steps + 1))
    assert sum(one.output_tokens for one in steps) == 18
    assert sum(one.prompt_tokens for one in steps) == 80 - engine.memory.stats().hit_tokens
    assert max(one.rows for one in steps) == 2


def test_blocks_that_the_step_writes_are_being_computed(engine: Engine) -> None:
    shown, clock = watched(engine), Ticking()
    asked(engine, "a", num_prompt=30)
    engine.step(clock)
    (first,) = shown
    assert first.pool.counts.computing == 8
    row = first.running[0]
    assert (row.request_id, row.tenant, row.priority, row.phase) == ("a", "someone", "normal", "prompt")
    assert (row.computed, row.known, row.prompt_tokens, row.output_tokens) == (0, 30, 30, 0)


def _pieces_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_picture, "PIECE_BLOCKS", 50)
    monkeypatch.setattr(engine_watch, "PIECE_BLOCKS", 50)
    monkeypatch.setattr(tree_picture, "PIECE_BLOCKS", 1)


def test_a_large_pool_is_drawn_a_piece_a_step_where_pieces_take_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pieces_of_one(monkeypatch)
    shown, clock = watched(engine), Ticking(0.003)
    asked(engine, "a")
    for _ in range(12):
        assert not shown
        engine.step(clock)
    engine.step(clock)
    assert len(shown) == 1
    assert sum((shown[0].pool.counts.free, shown[0].pool.counts.used, shown[0].pool.counts.computing)) == 600


def test_what_takes_long_is_drawn_less_often_than_it_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pieces_of_one(monkeypatch)
    shown, clock = watched(engine), Ticking(0.003)
    asked(engine, "a", max_tokens=400)
    for _ in range(300):
        engine.step(clock)
    assert clock.now_s > 6 * PERIOD_S
    assert 1 <= len(shown) <= 2


def test_a_long_step_leaves_time_for_more_than_one_piece(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    _pieces_of_one(monkeypatch)
    shown, clock = watched(engine), Ticking(0.001)
    asked(engine, "a")
    engine.step(clock)
    assert not shown
    clock.now_s += 1.0
    engine.step(clock)
    assert len(shown) == 1


def test_a_drawing_that_was_not_due_for_long_stops_a_step_no_longer_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a long step leaves more time; a long pause of drawing between short steps does not."""
    shown, clock = watched(engine), Ticking()
    watch = engine.watch
    assert watch is not None
    watch.work(clock)
    assert len(shown) == 1
    _pieces_of_one(monkeypatch)
    longest_s = 0.0
    for _ in range(200):
        clock.now_s, clock.tick_s = clock.now_s + 0.02, 0.001
        before_s = clock.now_s
        watch.work(clock)
        longest_s = max(longest_s, clock.now_s - before_s)
    assert len(shown) > 1
    assert longest_s < 0.01, "two milliseconds and the piece that goes beyond, of the map and of the tree"


def test_an_engine_that_was_idle_for_long_does_not_draw_for_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pieces_of_one(monkeypatch)
    shown, clock = watched(engine), Ticking(0.001)
    watch = engine.watch
    assert watch is not None
    watch.work(clock)
    clock.now_s += 3600.0
    before_s = clock.now_s
    watch.work(clock)
    assert clock.now_s - before_s < 0.03
    assert len(shown) <= 1


def test_an_idle_engine_is_due_after_a_period_and_at_once_while_a_drawing_is_under_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, clock = watched(engine), Ticking()
    watch = engine.watch
    assert watch is not None
    assert watch.seconds_until_due(0.0) == 0.0
    watch.work(clock)
    assert len(shown) == 1
    assert watch.seconds_until_due(0.1) == pytest.approx(PERIOD_S - 0.1)
    _pieces_of_one(monkeypatch)
    clock.now_s, clock.tick_s = 1.0, 0.003
    watch.work(clock)
    assert watch.seconds_until_due(clock.now_s) == 0.0


def test_a_step_that_began_before_anybody_looked_is_not_told(engine: Engine) -> None:
    shown = watched(engine)
    assert engine.watch is not None
    engine.watch.end_step(1.0)
    engine.watch.work(Ticking())
    assert shown[0].steps == ()
