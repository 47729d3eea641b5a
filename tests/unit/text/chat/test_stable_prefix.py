"""Lines that an operator has taken out of system texts."""

from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.text.chat.line_patterns import MAX_MATCHED_CHARS, MAX_PATTERN_CHARS, line_pattern
from quire.text.chat.stable_prefix import BUILT_IN, MAX_LINES, MAX_PATTERNS, StablePrefix

SYSTEM = """You help.
Today is Wednesday, 18 November 2026.
x-anthropic-billing-header: cc_version=2.1.197.ca3;
Session: 3f2a9c10d4
The time is 09:41.
The law of 2024-05-01 says that every library of more than a thousand books keeps a list.
Run brave-otter
"""


def left_of(listed: list[str], messages: list[Any]) -> tuple[list[Any], list[str]]:
    cleaned = StablePrefix(listed).cleaned(messages)
    return list(cleaned.messages), [line.by for line in cleaned.removed]


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dates", "Today is Wednesday, 18 November 2026."),
        ("times", "The time is 09:41."),
        ("ids", "Session: 3f2a9c10d4"),
        ("billing-header", "x-anthropic-billing-header: cc_version=2.1.197.ca3;"),
        (r"Run [a-z]+-[a-z]+", "Run brave-otter"),
    ],
)
def test_a_listed_line_is_taken_out_and_told_and_all_others_stay(name: str, line: str) -> None:
    cleaned = StablePrefix([name]).cleaned([said("system", SYSTEM), said("user", SYSTEM)])
    assert cleaned.messages == [said("system", SYSTEM.replace(line + "\n", "")), said("user", SYSTEM)]
    assert [(one.text, one.by) for one in cleaned.removed] == [(line, name)]


def test_only_the_system_texts_that_a_conversation_begins_with_are_looked_at() -> None:
    line = "The time is 09:41."
    roles = ["system", "developer", "system", "user", "system", "assistant", "tool", "developer"]
    left, by = left_of(["times"], [said(role, line) for role in roles])
    assert [one["content"] for one in left] == ["", "", "", line, line, line, line, line]
    assert by == ["times"] * 3


def test_a_text_and_a_list_of_parts_come_to_the_same() -> None:
    parts = [{"type": "text", "text": SYSTEM}, {"type": "image", "source": "?"}]
    left, by = left_of(list(BUILT_IN), [said("system", parts)])
    ((text_left,), text_by) = left_of(list(BUILT_IN), [said("system", SYSTEM)])
    assert left[0]["content"] == [{"type": "text", "text": text_left["content"]}, parts[1]]
    assert by == text_by


def test_nothing_listed_changes_nothing() -> None:
    messages = [said("system", SYSTEM)]
    assert StablePrefix().cleaned(messages).messages is messages
    assert not StablePrefix()


@pytest.mark.parametrize(
    "strange", [None, 7, "text", {}, {"role": "system"}, said("system", 5), said("system", [5, {}])]
)
def test_what_is_no_message_is_left_for_others_to_refuse(strange: Any) -> None:
    left, by = left_of(list(BUILT_IN), [strange])
    assert (left, by) == ([strange], [])


@given(st.lists(st.text(alphabet="ab 1:-\nTMonday2026", max_size=40), max_size=12))
def test_what_stays_is_what_was_there_in_its_order(lines: list[str]) -> None:
    text = "\n".join(lines)
    cleaned = StablePrefix(BUILT_IN).cleaned([said("system", text)])
    left = cleaned.messages[0]["content"].split("\n")
    gone = [one.text for one in cleaned.removed]
    assert sorted([*left, *gone]) == sorted([*text.split("\n"), *([""] if len(gone) == len(text.split("\n")) else [])])
    rest = iter(text.split("\n"))
    assert all(line in rest for line in left) or not any(left)


def test_lines_far_down_or_very_long_stay() -> None:
    far = "\n" * MAX_LINES + "The time is 09:41."
    long = "The time is 09:41." + " " * 3 + "x" * MAX_MATCHED_CHARS
    assert left_of(["times"], [said("system", far), said("system", long)])[1] == []


@pytest.mark.parametrize(
    "source",
    ["(a+)+", "(a*)*b", "a*a*a*", "(ab){2,}", "x{2}{3}", "a??", "a*+", "^a$", "(?=a)", "(?P<n>a)", r"(a)\1", "(a",
     "a)", "[a", "[[a]]", "*a", "a|*", "a{5,2}", "", "x" * (MAX_PATTERN_CHARS + 1), r"\bfoo", r"\A", "a\\",
     "(a|b|c|d)" * 12, "a?" * 40, "(a?)?" * 20, "a{0,999}b{0,999}"],
)  # fmt: skip
def test_a_pattern_that_could_keep_the_matcher_busy_is_refused_with_the_reason(source: str) -> None:
    with pytest.raises(ConfigError, match="stable_prefix: expected a name or a plain regular expression"):
        line_pattern(source)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (r"Date: \d{4}-\d{2}-\d{2} .*", "Date: 2026-11-18 (a Wednesday)"),
        (r"(?:Mon|Tue|Wednes)day.?", "Wednesday!"),
        (r"[^]a]+ \[x\]", "bcd [x]"),
        ("{a} costs [$]5", "{a} costs $5"),
        (r"(nonce|salt)=[0-9a-f]+(;)?", "salt=0af;"),
    ],
)
def test_a_plain_pattern_matches_what_the_library_s_would(source: str, line: str) -> None:
    assert line_pattern(source).fullmatch(line)
    assert not line_pattern(source).fullmatch(line + "\nx")


@given(st.text(alphabet="ab|()[]{}*+?.\\d19,:^$", max_size=24))
def test_whatever_is_let_through_ends_soon_on_the_worst_of_lines(source: str) -> None:
    try:
        pattern = line_pattern(source)
    except ConfigError:
        return
    began_s = process_time()
    for line in ("a" * MAX_MATCHED_CHARS, "ab" * (MAX_MATCHED_CHARS // 2), "a" * (MAX_MATCHED_CHARS - 1) + "!"):
        pattern.fullmatch(line)
    assert process_time() - began_s < 1.0


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_PATTERNS} patterns"):
        StablePrefix(["a"] * (MAX_PATTERNS + 1))
