"""What `quire top` makes of snapshots: figures, lines and pictures, whatever a server says, on any screen."""

import io
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from quire.cli.watch.top_figures import (
    HOUR_ROWS,
    MAX_STEPS,
    TopMetrics,
    duration,
    json_fields,
    number,
    percent,
    plain_line,
)
from quire.cli.watch.top_glyphs import ASCII, UNICODE, Glyphs, bar, history_curve, proportional_widths
from quire.cli.watch.top_picture import Frame, screen_lines
from quire.cli.watch.watch_source import WatchError
from quire.cli.watch.watched_state import read_snapshot
from quire.core.inspect.snapshots import CellCounts
from tests.support.servers.watch_stand_in import snapshot

URL = "http://127.0.0.1:8000"


def figures_of(*told: dict[str, Any]) -> TopMetrics:
    figures = TopMetrics(URL)
    for one in told:
        figures.add(read_snapshot(json.dumps(one).encode()))
    return figures


def drawn(figures: TopMetrics, width: int = 100, height: int = 40, glyphs: Glyphs = UNICODE, **more: Any) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    for line in screen_lines(figures, Frame(width, height, glyphs), **more):
        console.print(line, no_wrap=True, overflow="crop")
    return console.export_text()


class TestThePicture:
    def test_it_shows_every_essential(self) -> None:
        shown = drawn(figures_of(snapshot()))
        for words in (
            URL, "[coder ready]", "writer loaded", "812 tokens/s", "4,100 prompt/s", "120 ms first token",
            "83% hit rate", "1 running", "7 waiting", "2 preempted", "1,000 blocks of 32 tokens",
            "free 500 50%", "cached 300 30%",
            "used 100 10%", "shared 80 8%", "pinned 15 2%", "computing 5 <1%", "last 50 steps", "max 192", "max 16",
            "low     nightly", "41,000  diverged, 12 requests", "req_1", "alice", "640/641", "512",
        ):  # fmt: skip
            assert words in shown, words

    def test_a_gateway_does_not_say_that_blocks_are_free_of_which_it_knows_nothing(self) -> None:
        fleet = {"members": [{"name": "a"}], "num_moved": 0}
        shown = drawn(figures_of(snapshot(fleet=fleet)))
        assert "free or cached 500 50%" in shown
        assert "used 100 10%" in shown
        assert not any(f"{state} " in shown for state in ("shared", "pinned", "computing"))

    def test_without_colours_every_state_of_a_block_can_still_be_told(self) -> None:
        for glyphs in (UNICODE, ASCII):
            assert len(set(glyphs.states.values())) == 6
            line = bar(CellCounts(1, 1, 1, 1, 1, 1), 60, glyphs).plain
            assert {line.count(glyph) for glyph in glyphs.states.values()} == {10}

    @given(
        width=st.integers(20, 200),
        height=st.integers(1, 60),
        num_running=st.integers(0, 300),
        num_waiting=st.integers(0, 40),
        trouble=st.none() | st.text(),
        is_ascii=st.booleans(),
    )
    @settings(max_examples=150, deadline=None)
    def test_it_never_needs_more_room_than_there_is(
        self, width: int, height: int, num_running: int, num_waiting: int, trouble: str | None, is_ascii: bool
    ) -> None:
        told = snapshot()
        told["running"] *= num_running
        told["queue"] *= num_waiting
        glyphs = ASCII if is_ascii else UNICODE
        lines = screen_lines(figures_of(told), Frame(width, height, glyphs), trouble, "q ends")
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)
        assert lines[-1].plain.startswith("q ends")
        assert not is_ascii or all(line.plain.isascii() for line in lines)

    @given(st.text(max_size=200))
    @settings(deadline=None)
    def test_no_name_steers_the_terminal(self, name: str) -> None:
        told = snapshot(model=name, models=[{"name": name, "state": name}])
        told["running"][0] |= dict.fromkeys(("request_id", "tenant", "class", "phase"), name)
        told["queue"] = [{"class": name, "tenant": name, "num_requests": 1}]
        told["misses"] = [{"reason": name, "num_tokens": 1, "num_requests": 1}]
        told["warnings"] = [{"tenant": name, "line": name, "num_lost_tokens": 1, "num_requests": 1}]
        told["workers"] = [{"number": 1, "state": "ended", "why": name}]
        for line in screen_lines(figures_of(told), Frame(100, 40, UNICODE), name):
            assert line.plain.isprintable(), repr(line.plain)

    def test_what_went_wrong_is_said_above_what_was_seen_last(self) -> None:
        shown = drawn(figures_of(snapshot()), error="connection refused")
        assert "connection refused; retrying" in shown
        assert "812 tokens/s" in shown

    def test_a_model_that_is_not_loaded_has_no_pool_and_is_said_so(self) -> None:
        shown = drawn(figures_of(snapshot(pool=None, steps=[], running=[], queue=[], misses=[])))
        for words in ("the model is not loaded", "no running requests", "no waiting requests", "no misses"):
            assert words in shown

    def test_a_fleet_a_dead_worker_and_unstable_prefixes_are_told(self) -> None:
        fleet = {"members": [{"name": "a"}, {"name": "b"}], "num_moved": 3, "num_quarantined": 1, "hit_rate": 0.5}
        worker = {"number": 4, "state": "ended", "why": "it was killed by signal 9"}
        warning = {
            "tenant": "alice",
            "line": "x-id: 1",
            "num_lost_tokens": 41_000,
            "num_requests": 12,
            "kind": "header",
        }
        shown = drawn(figures_of(snapshot(fleet=fleet, workers=[worker], warnings=[warning])), 120)
        assert "2 members, 3 streams moved, 1 quarantined, hit rate 50%" in shown
        assert "worker 4 ended: it was killed by signal 9" in shown
        assert 'alice\'s prompts change at "x-id: 1": 41,000 tokens lost in 12 requests' in shown
        once = drawn(figures_of(snapshot(warnings=[{**warning, "num_requests": 1}])), 120)
        assert "41,000 tokens lost in 1 request (" in once


class TestTheFigures:
    def test_speed_is_that_of_the_last_seconds_once_they_were_seen(self) -> None:
        steps = [{"step": at, "at_s": 1000.0 + at / 10, "output_tokens": 30, "prompt_tokens": 5} for at in range(1, 41)]
        figures = figures_of(snapshot(), snapshot(at_s=1004.0, steps=steps))
        assert figures.output_tokens_per_s == pytest.approx(300.0)
        assert figures.prompt_tokens_per_s == pytest.approx(50.0)
        idle = figures_of(snapshot(steps=[]), snapshot(at_s=1004.0, steps=[]))
        assert idle.output_tokens_per_s == 0
        fleet = {"members": [], "num_moved": 0}
        gateway = figures_of(snapshot(steps=[], fleet=fleet), snapshot(at_s=1004.0, steps=[], fleet=fleet))
        assert gateway.output_tokens_per_s == 812

    def test_old_figures_of_the_history_are_not_called_the_latest(self) -> None:
        told = snapshot(at_s=1100.0, steps=[])
        assert figures_of(told).hit_rate is None
        assert figures_of(told).output_tokens_per_s is None

    def test_rows_without_a_value_are_passed_over(self) -> None:
        told = snapshot()
        told["history"].append(told["history"][-1] | {"at_s": 1001.0, "ttft_p50_s": None, "hit_rate": None})
        assert figures_of(told).ttft_p50_s == 0.12

    def test_what_is_kept_is_bounded_and_nothing_is_kept_twice(self) -> None:
        figures = figures_of(*[snapshot(at_s=1000.0 + at) for at in range(30)])
        assert len(figures.history) == 31
        many = [snapshot()["history"][0] | {"at_s": float(at)} for at in range(5000)]
        steps = [{"step": at, "at_s": float(at)} for at in range(5000)]
        figures = figures_of(snapshot(history=many, steps=steps))
        assert (len(figures.history), len(figures.steps)) == (HOUR_ROWS, MAX_STEPS)

    @pytest.mark.parametrize("other", [{"at_s": 3.0}, {"at_s": 1001.0, "model": "writer"}])
    def test_another_life_or_model_begins_anew(self, other: dict[str, Any]) -> None:
        figures = figures_of(snapshot(), snapshot(steps=[], history=[], **other))
        assert not figures.steps
        assert not figures.history

    def test_a_script_gets_the_documented_fields(self) -> None:
        told = json_fields(figures_of(snapshot()))
        assert set(told) == {
            "v", "server", "model", "models", "output_tokens_per_s", "prompt_tokens_per_s", "ttft_p50_s", "hit_rate",
            "pool", "num_running", "num_waiting", "running", "queue", "misses", "totals", "workers", "warnings",
            "fleet", "engine",
        }  # fmt: skip
        assert told["pool"] == {
            "num_blocks": 1000, "block_size": 32, "free": 500, "cached": 300, "used": 100, "shared": 80, "pinned": 15,
            "computing": 5,
        }  # fmt: skip
        assert (told["num_running"], told["num_waiting"]) == (1, 7)
        assert told["running"] == snapshot()["running"]
        assert told["queue"] == [{"class": "low", "tenant": "nightly", "num_requests": 7}]
        assert json.loads(json.dumps(told)) == told

    def test_a_line_says_the_same_in_words(self) -> None:
        assert plain_line(figures_of(snapshot())) == (
            "coder, 812 tokens/s, 4,100 prompt tokens/s, first token 120 ms, hit rate 83%, 1 running, 7 waiting, "
            "pool 20% in use"
        )
        assert plain_line(TopMetrics(URL)) == "no data yet"

    def test_numbers_are_as_long_as_they_are_worth(self) -> None:
        assert [number(one) for one in (None, 0, 0.25, 9.94, 12.3, 4100)] == ["-", "0", "0.2", "9.9", "12", "4,100"]
        assert [duration(one) for one in (None, 0.0123, 0.999, 2.34)] == ["-", "12 ms", "999 ms", "2.3 s"]
        assert [percent(one) for one in (None, 0, 0.001, 0.01, 0.834, 1)] == ["-", "0%", "<1%", "1%", "83%", "100%"]


class TestTheGlyphs:
    @given(st.lists(st.integers(0, 10**6), min_size=6, max_size=6), st.integers(6, 300))
    def test_a_bar_is_full_and_shows_all_that_is_there_in_proportion(self, values: list[int], width: int) -> None:
        given_cells = proportional_widths(values, width)
        assert sum(given_cells) == (width if sum(values) else 0)
        for value, cells in zip(values, given_cells, strict=True):
            assert (value > 0) == (cells > 0)
            if sum(values):
                assert abs(cells - width * value / sum(values)) <= 6

    @given(st.lists(st.none() | st.floats(0, 1e9), max_size=500), st.integers(1, 120))
    @example([5e-324, 0.0], 1)
    def test_a_curve_is_as_wide_as_it_may_be_and_something_never_reads_as_nothing(
        self, values: list[float | None], width: int
    ) -> None:
        line = history_curve(values, width, UNICODE)
        assert len(line) == (width if values else 0)
        assert bool(line.strip()) == any(value for value in values)

    def test_a_terminal_without_unicode_gets_ascii(self) -> None:
        assert [Glyphs.for_encoding(one) for one in ("utf-8", "UTF8", "ascii", "iso-8859-1")] == [
            UNICODE, UNICODE, ASCII, ASCII,
        ]  # fmt: skip
        assert all(part.isascii() for part in (*ASCII.states.values(), ASCII.levels, ASCII.line))


class TestTheSnapshots:
    @given(st.binary(max_size=100) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
    def test_what_is_no_snapshot_is_told_as_that(self, data: bytes | str) -> None:
        with pytest.raises(WatchError):
            read_snapshot(data if isinstance(data, bytes) else data.encode())

    def test_a_server_of_another_age_may_say_more_and_less(self) -> None:
        seen = read_snapshot(b'{"at_s": 1.5, "later": {"x": [1]}, "pool": null}')
        assert (seen.at_s, seen.running, seen.pool) == (1.5, (), None)
