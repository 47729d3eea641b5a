"""What is written down of an engine, what is not, and that writing never matters to the engine."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.engine import trace_recorder
from quire.engine.trace_recorder import TraceSettings
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.workers.traced_engines import RandomLife, traced_engine, write_life


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_life_begins_with_what_its_plans_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_life(path, 1)
    header = records(path)[0]
    assert header["is"] == "header"
    assert header["memory"]["num_blocks"] in (8, 14, 40)
    assert header["scheduler"]["queue"]["max_requests"] == 6


def test_an_idle_engine_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    life = RandomLife(traced_engine(path, Random(1)), Random(1))
    for _ in range(50):
        life.step()
    life.finish()
    assert [one["is"] for one in records(path)] == ["header"]


def test_messages_of_errors_which_may_quote_a_grammar_are_left_out(tmp_path: Path) -> None:
    permuted, plain = tmp_path / "permuted.jsonl", tmp_path / "plain.jsonl"
    for seed in range(20):
        write_life(permuted, seed)
        write_life(plain, seed, own_tokens=True)
    assert "secret" not in permuted.read_text()
    assert '"code":"grammar_failed"' in permuted.read_text()
    assert "secret" in plain.read_text()


def test_tokens_have_other_names_and_equal_ones_the_same(tmp_path: Path) -> None:
    permuted, plain = tmp_path / "permuted.jsonl", tmp_path / "plain.jsonl"
    write_life(permuted, 3)
    write_life(plain, 3, own_tokens=True)
    prompts = [[one["prompt"] for one in records(path) if one["is"] == "submit"] for path in (permuted, plain)]
    pairs = {pair for one, other in zip(*prompts, strict=True) for pair in zip(one, other, strict=True)}
    assert len(pairs) == len(dict(pairs)) == len({own for _, own in pairs}) == 2
    assert any(name != own for name, own in pairs)


def test_a_recorder_that_fails_ends_the_trace_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    life = RandomLife(traced_engine(path, Random(2)), Random(2))

    def broken(_events: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(trace_recorder, "event_fields", broken)
    life.live(100)
    life.finish()
    assert life.engine.scheduler.stats.num_steps > 10
    assert records(path)[-1] == {"is": "ended", "why": "could not write a line: RuntimeError"}


def test_an_engine_is_not_recorded_into_a_file_that_is_not_there(tmp_path: Path) -> None:
    engine = traced_engine(tmp_path / "trace.jsonl", Random(1))
    engine.close()
    with raises_code(ConfigError, "cannot_open_trace"):
        engine.record(TraceSettings(str(tmp_path / "other.jsonl"), 1 << 20, bytes(32)), 0.0)
