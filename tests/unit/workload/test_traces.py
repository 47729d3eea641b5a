"""Traces in four formats: each is told by its first line, content stays what it was, what is no trace is told."""

import gzip
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.workload.trace_requests import TraceRules, apply_rules, trace_requests
from quire.workload.traces import CLASSES, MAX_TOKEN_ID, SPAN_TOKENS, Row, Trace, TraceError, read_trace, write_trace

SHAREGPT = {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 1_500_000_000, "input_tok_ids": [0, 7, 9]}
OWN = {"arrival_s": 0.0, "prompt_tokens": 40, "output_tokens": 2, "hash_ids": [5, 6], "block_tokens": 32}
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44"


def read_text(folder: Path, text: str) -> Trace:
    path = folder / "trace.txt"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def lines_of(*rows: Mapping[str, object]) -> str:
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (lines_of(SHAREGPT), Row(0.0, 3, 2, token_ids=(0, 7, 9))),
        (lines_of({**SHAREGPT, "input_tok_ids": []}), Row(0.0, 3, 2)),
        (lines_of(OWN), Row(0.0, 40, 2, (5, 6), 32)),
        (lines_of({**OWN, "tenant": "shop", "class": "low"}), Row(0.0, 40, 2, (5, 6), 32, (), "shop", "low")),
        (lines_of({"arrival_s": 2, "output_tokens": 1, "token_ids": [4, 4]}), Row(0.0, 2, 1, token_ids=(4, 4))),
        (lines_of(MOONCAKE), Row(0.0, 600, 1, (1, 2))),
        (AZURE, Row(0.0, 374, 44)),
    ],
)
def test_the_first_line_tells_the_format(tmp_path: Path, text: str, row: Row) -> None:
    assert read_text(tmp_path, text).rows == (row,)


def test_token_ids_are_the_prompt_and_no_answer_begins_like_one(tmp_path: Path) -> None:
    more = {**SHAREGPT, "input_toks": 4, "arrival_time_ns": 2_000_000_000, "input_tok_ids": [0, 7, 9, 2]}
    unknown = {**SHAREGPT, "arrival_time_ns": 3_000_000_000, "input_tok_ids": []}
    asked = list(trace_requests(read_text(tmp_path, lines_of(SHAREGPT, more, unknown))))
    assert [one.prompt for one in asked] == [(1, 8, 10), (1, 8, 10, 3), (11, 11, 11)]
    assert [one.arrival_s for one in asked] == [0.0, 0.5, 1.5]


def test_scaled_token_ids_share_what_they_shared() -> None:
    common = tuple(range(100, 100 + 20 * SPAN_TOKENS))
    rows = (Row(0.0, 400, 8, token_ids=common + (1,) * 80), Row(1.0, 352, 8, token_ids=common + (2,) * 32))
    trace = Trace("t", rows).fitted(102)
    one, other = (asked.prompt for asked in trace_requests(trace))
    assert len(one) == int(400 * trace.length_scale)
    num_common = next(at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    assert num_common == int(len(common) * trace.length_scale)
    visits = list(trace.visits())
    assert [sum(span.num_tokens for span in visit.turns[0].spans) for visit in visits] == [len(one), len(other)]
    assert visits[0].turns[0].spans[:20] == visits[1].turns[0].spans[:20]


def test_a_trace_that_names_tenants_and_classes_keeps_them(tmp_path: Path) -> None:
    text = lines_of({**OWN, "tenant": "shop", "class": "low"}, OWN)
    one, other = trace_requests(read_text(tmp_path, text), TraceRules(class_shares={"high": 1.0}))
    assert (one.tenant, one.priority) == ("shop", "low")
    assert (other.tenant, other.priority) == ("tenant0", "high")


ids = st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=40).map(tuple)
times = st.floats(0, 1e6, allow_subnormal=False)
named = st.builds(
    Row,
    times,
    st.integers(0, 5_000),
    st.integers(0, 5_000),
    st.lists(st.integers(-(1 << 40), 1 << 70), min_size=1, max_size=9).map(tuple),
    st.integers(1, 4_096),
    st.just(()),
    st.text(max_size=8),
    st.sampled_from(("", *CLASSES)),
)
spelled = st.builds(lambda at, given: Row(at, len(given), 3, token_ids=given), times, ids)
bare = st.builds(Row, times, st.integers(0, 5_000), st.integers(0, 5_000))


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(named | spelled | bare, min_size=1, max_size=6), suffix=st.sampled_from((".jsonl", ".jsonl.gz")))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], suffix: str) -> None:
    path = tmp_path_factory.mktemp("own") / f"written{suffix}"
    first, *rest = sorted(rows, key=lambda row: row.arrival_s)
    rows = [Row(0.0, first.prompt_tokens, 1, first.hash_ids, first.block_tokens, first.token_ids), *rest]
    write_trace(path, rows)
    assert read_trace(path) == Trace("written", tuple(rows))


def test_a_sample_that_was_written_gives_the_same_requests(tmp_path: Path) -> None:
    rows = tuple(Row(float(at), 1_024, 5, (at % 7, at)) for at in range(40))
    trace, rules = Trace("t", rows), TraceRules(2.0, 0.5, 3, {"high": 0.4})
    path = tmp_path / "t.jsonl"
    kept = [row for _, row in apply_rules(trace, rules)]
    write_trace(path, kept)
    again = list(trace_requests(read_trace(path)))
    sampled = list(trace_requests(trace, rules))
    assert 0 < len(sampled) < 40
    start_s = sampled[0].arrival_s
    assert [(one.prompt, one.tenant, one.priority, one.arrival_s) for one in again] == [
        (one.prompt, one.tenant, one.priority, one.arrival_s - start_s) for one in sampled
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"when": 1}', "input_toks .ShareGPT., arrival_s .quire."),
        ('{"timestamp": 1', "line 1"),
        (lines_of({**SHAREGPT, "input_toks": 4}), "expected 4 token ids for the prompt, got 3"),
        (lines_of({**SHAREGPT, "input_tok_ids": [0, -1, 1]}), "expected token ids from 0 to"),
        (lines_of({**SHAREGPT, "input_tok_ids": "abc"}), "to be a list of integers, got str"),
        (lines_of({**OWN, "class": "first"}), "expected a class of high, normal, low, got 'first'"),
        (lines_of({**OWN, "block_tokens": 0}), "expected 1 to .* tokens per block"),
        (lines_of({**OWN, "arrival_s": float("nan")}), "a finite arrival time"),
        (lines_of({**OWN, "prompt_tokens": float("inf")}), "line 1"),
        (lines_of(OWN, SHAREGPT), "line 2"),
        (AZURE + "," + "9" * 200_000, "line 2"),
    ],
)
def test_a_line_that_is_no_request_is_told_with_what_was_expected(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        read_text(tmp_path, text)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        write_trace(tmp_path / "none" / "t.jsonl", [Row(0.0, 1, 1)])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from((SHAREGPT, OWN, MOONCAKE)), st.data())
def test_damaged_fields_are_read_or_refused_and_never_anything_else(
    tmp_path_factory: pytest.TempPathFactory, good: Mapping[str, object], data: st.DataObject
) -> None:
    bad = {**good, data.draw(st.sampled_from(sorted(good))): data.draw(values)}
    text = lines_of(good, bad) if data.draw(st.booleans()) else lines_of(bad, good)
    cut = data.draw(st.integers(0, len(text)))
    for one in (text, text[:cut], text[cut:]):
        try:
            trace = read_text(tmp_path_factory.mktemp("bad"), one)
        except TraceError:
            continue
        if all(row.prompt_tokens < 1 << 16 for row in trace.rows):
            assert all(asked.prompt for asked in trace_requests(trace))


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=80), st.integers(0, 60))
def test_a_damaged_archive_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("bad") / "t.jsonl.gz"
    whole = gzip.compress(lines_of(OWN, OWN).encode(), mtime=0)
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    with suppress(TraceError):
        assert read_trace(path).rows
