"""What pretended clients say: the same for the same seed, with in common what it should have."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.workload.mixes import MIXES, MixSizes, sample_visits
from quire.workload.traces import Row, Trace, TraceError, read_trace
from quire.workload.visits import Span
from quire.workload.writing import TOKEN_IDS, WORDS, SpanWriter

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_spans_of_one_name_begin_with_the_same_content() -> None:
    writer = SpanWriter("7")
    short, long = Span("system", 5), Span("system", 12)
    assert writer.words([long]).startswith(writer.words([short]))
    assert writer.ids([long])[:5] == writer.ids([short])
    assert len(writer.ids([long])) == len(writer.words([long]).split()) == 12


def test_another_name_or_seed_is_other_content() -> None:
    texts = {SpanWriter(seed).words([Span(name, 20)]) for seed in ("1", "2") for name in ("a", "b")}
    assert len(texts) == 4


def test_token_ids_stay_in_their_range_and_words_are_distinct() -> None:
    assert set(SpanWriter("1").ids([Span("a", 500)])) <= set(TOKEN_IDS)
    assert len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_the_same_for_the_same_seed_and_makes_as_many_requests_as_asked(name: str) -> None:
    mix = MIXES[name]
    visits = sample_visits(mix, mix.sizes, "3", 25)
    assert visits == sample_visits(mix, mix.sizes, "3", 25)
    assert sum(len(visit.turns) for visit in visits) == 25
    assert len({visit.name for visit in visits}) == len(visits)
    assert all(span.num_tokens >= 1 for visit in visits for turn in visit.turns for span in turn.spans)


def test_distinct_prompts_share_nothing_and_shared_ones_share_their_system_prompt() -> None:
    sizes = MixSizes(prompt_tokens=10, output_tokens=4, shared_tokens=30, num_groups=2)
    alone = sample_visits(MIXES["distinct"], sizes, "1", 20)
    together = sample_visits(MIXES["shared"], sizes, "1", 20)
    assert len({turn.spans for visit in alone for turn in visit.turns}) == 20
    assert {visit.system for visit in together} == {(Span("system 0", 30),), (Span("system 1", 30),)}


def test_a_mixed_workload_has_every_class_with_its_priority() -> None:
    visits = sample_visits(MIXES["mixed"], MIXES["mixed"].sizes, "1", 200)
    assert {(visit.kind, visit.priority) for visit in visits} == {
        ("person", "high"),
        ("agent", "normal"),
        ("job", "low"),
    }


def test_a_mooncake_trace_keeps_its_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [1, 4]},
    ]
    path = tmp_path / "small.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(json.dumps(line) for line in lines))
    first, second = read_trace(path).visits(speedup=2.0)
    assert first.turns[0].spans == (Span("hash 1", 512), Span("hash 2", 512), Span("hash 3", 76))
    assert second.turns[0].spans == (Span("hash 1", 512), Span("hash 4", 188))
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)
    assert (first.turns[0].max_tokens, second.turns[0].max_tokens) == (7, 9)


def test_an_azure_trace_starts_at_zero_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    path.write_bytes((AZURE + rows).encode())
    first, second = read_trace(path).visits()
    assert (first.arrival_s, round(second.arrival_s or 0, 4)) == (0.0, 4.3146)
    assert first.turns[0].spans == (Span("row 0", 374),)
    assert second.turns[0].max_tokens == 109


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 4_000)), min_size=1, max_size=8), st.integers(16, 9_000)
)
def test_a_fitted_trace_fits_whatever_the_lengths(lengths: list[tuple[int, int]], context: int) -> None:
    rows = tuple(
        Row(float(at), prompt, output, tuple(range(-(-prompt // 512)))) for at, (prompt, output) in enumerate(lengths)
    )
    for visit, row in zip(Trace("t", rows).fitted(context).visits(), rows, strict=True):
        turn = visit.turns[0]
        assert 2 <= turn.num_tokens + turn.max_tokens <= context
        assert turn.num_tokens <= row.prompt_tokens
        assert all(span.num_tokens > 0 for span in turn.spans)


def test_equal_hashes_at_equal_places_are_equal_spans_after_scaling() -> None:
    rows = (Row(0.0, 5_000, 10, tuple(range(10))), Row(1.0, 3_000, 10, (0, 1, 2, 3, 4, 99)))
    one, other = (visit.turns[0].spans for visit in Trace("t", rows).fitted(500).visits())
    assert one[:5] == other[:5]
    assert one[5] != other[5]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "begins with"),
        ("hello\n", "begins with 'hello'"),
        (AZURE, "got none"),
        (AZURE + "yesterday,1,2\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46.6,-4,2\n", "0 to"),
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[]\n', "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "odd.txt"
    path.write_text(content)
    with pytest.raises(TraceError, match=told):
        read_trace(path)


def test_a_missing_file_and_a_damaged_archive_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gz").write_bytes(b"not gzip")
    for name in ("none.csv", "bad.gz"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path / name)
