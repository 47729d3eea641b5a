"""A small packed trace whose one line is larger than the machine's memory ends `quire sim` with a sentence."""

import gzip
from pathlib import Path

import pytest

from quire.workload import traces
from quire.workload.traces import TraceError, read_trace

ROW = '{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2, "tenant": "%s"}\n'


class OneEndlessLine:
    """A file that has no line break, and notices how much of a line is taken at once."""

    def __init__(self) -> None:
        self.largest = 0

    def __enter__(self) -> "OneEndlessLine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> "OneEndlessLine":
        return self

    def __next__(self) -> str:
        raise MemoryError

    def readline(self, limit: int = -1) -> str:
        if limit < 0:
            raise MemoryError
        self.largest = max(self.largest, limit)
        return "x" * limit


def test_a_line_without_an_end_is_read_no_further_than_a_line_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed: MemoryError, with a traceback."""
    endless = OneEndlessLine()
    monkeypatch.setattr(traces, "_open_text", lambda *_: endless)
    with pytest.raises(TraceError):
        read_trace(Path("bomb.jsonl.gz"))
    assert 0 < endless.largest <= 1 << 28


def test_a_long_line_behind_good_ones_is_named_and_a_shorter_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_CHARS", 1000, raising=False)
    path = tmp_path / "trace.jsonl.gz"
    for tenant, is_fine in (("t" * 900, True), ("t" * 1000, False)):
        with gzip.open(path, "wt") as file:
            file.write(ROW % "a" + ROW % tenant)
        if is_fine:
            assert len(read_trace(path).rows) == 2
        else:
            with pytest.raises(TraceError, match="line 2 of"):
                read_trace(path)


def test_a_trace_of_more_requests_than_memory_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROW % "a")

    def too_many(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(traces, "_checked_row", too_many)
    with pytest.raises(TraceError):
        read_trace(path)
