"""Dates, times, ids and numbers in a line."""

from time import process_time

import pytest

from quire.text.chat.changing_text import changed_kinds, first_change, line_pattern


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("Today is 18 November 2026, 09:41", "Today is <date>, <time>"),
        ("Current time: 2026-11-18T20:50:19.123Z", "Current time: <moment>"),
        ("Today's date: Wed Nov 18 2026", "Today's date: <date> <date>"),
        ("Date: 18/11/2026", "Date: <date>"),
        ("18.11.26 and 11-18-2026", "<date> and <date>"),
        ("Thursday, the 5th of May 2026 at 3:04 PM UTC", "<date> at <time>"),
        ("cc_version=2.1.197.ca3; cli", "cc_version=<n>.<n>.<n>.<n>; cli"),
        ("Session 0b1e7a52-3c4d-4e5f-8a9b-0c1d2e3f4a5b", "Session <uuid>"),
        ("HEAD 3f2a9c10d4", "HEAD <id>"),
        ("nonce: V1StGXR8_Z5jdHi6B-myT", "nonce: <id>"),
        ("run 01HF9K3ZQ8XYZ", "run <id>"),
        ("at 1763500000.123 and 1763500000", "at <time> and <time>"),
        ("It may march in the sun of the second", "It may march in the sun of the second"),
        ("three words", "three words"),
    ],
)
def test_a_line_is_folded_to_what_stays(line: str, pattern: str) -> None:
    assert line_pattern(line).pattern.replace("<date> <date>", "<date>") == pattern.replace("<date> <date>", "<date>")


def test_what_differs_between_two_lines_of_one_pattern_is_named_by_its_kind() -> None:
    one, other = line_pattern("Monday, 09:41, build 7"), line_pattern("Monday, 09:42, build 8")
    assert one.pattern == other.pattern
    assert changed_kinds(one, other) == ["times", "numbers"]
    assert one.split_after(first_change(one, other)) == ("<date>, <time>", ", build <n>")
    assert changed_kinds(one, one) == []


@pytest.mark.parametrize("unit", ["1", "a1", "Jan ", "12:", "-1", "2026-", "aA1_", "f", "Mon, ", "<", " 1:00", "a.1"])
def test_no_line_keeps_it_busy(unit: str) -> None:
    began_s = process_time()
    for _ in range(20):
        line_pattern(unit * 4000)
    assert process_time() - began_s < 1.0
