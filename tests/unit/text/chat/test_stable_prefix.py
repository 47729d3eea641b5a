"""Lines that an operator has taken out of system texts."""

from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.text.chat.stable_prefix import (
    BUILT_IN,
    MAX_LINES,
    MAX_MATCHED_CHARS,
    MAX_PATTERN_CHARS,
    MAX_PATTERNS,
    StablePrefix,
    without_lines,
)
from tests.support.errors import raises_code

SYSTEM = """You help.
Today is Wednesday, 18 November 2026.
x-anthropic-billing-header: cc_version=2.1.197.ca3;
Session: 3f2a9c10d4
The time is 09:41.
The law of 2024-05-01 says that every library of more than a thousand books keeps a list.
Run brave-otter
"""


def left_of(listed: list[str], messages: list[Any]) -> tuple[list[Any], list[str]]:
    left, removed = StablePrefix(listed).remove_lines(messages)
    return list(left), [line.pattern for line in removed]


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dates", "Today is Wednesday, 18 November 2026."),
        ("times", "The time is 09:41."),
        ("ids", "Session: 3f2a9c10d4"),
        ("billing-header", "x-anthropic-billing-header: cc_version=2.1.197.ca3;"),
        ("Run *-*", "Run brave-otter"),
    ],
)
def test_a_listed_line_is_taken_out_and_told_and_all_others_stay(name: str, line: str) -> None:
    left, removed = StablePrefix([name]).remove_lines([said("system", SYSTEM), said("user", SYSTEM)])
    assert left == [said("system", SYSTEM.replace(line + "\n", "")), said("user", SYSTEM)]
    assert [(one.text, one.pattern) for one in removed] == [(line, name)]


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
    assert without_lines(messages, None) == (messages, ())
    assert StablePrefix().remove_lines(messages) == (messages, ())


@pytest.mark.parametrize(
    "strange", [None, 7, "text", {}, {"role": "system"}, said("system", 5), said("system", [5, {}])]
)
def test_what_is_no_message_is_left_for_others_to_refuse(strange: Any) -> None:
    left, by = left_of(list(BUILT_IN), [strange])
    assert (left, by) == ([strange], [])


@given(st.lists(st.text(alphabet="ab 1:-\nTMonday2026", max_size=40), max_size=12))
def test_what_stays_is_what_was_there_in_its_order(lines: list[str]) -> None:
    text = "\n".join(lines)
    (kept,), removed = StablePrefix(BUILT_IN).remove_lines([said("system", text)])
    left = kept["content"].split("\n")
    gone = [one.text for one in removed]
    assert sorted([*left, *gone]) == sorted([*text.split("\n"), *([""] if len(gone) == len(text.split("\n")) else [])])
    rest = iter(text.split("\n"))
    assert all(line in rest for line in left) or not any(left)


def test_lines_far_down_or_very_long_stay() -> None:
    far = "\n" * MAX_LINES + "The time is 09:41."
    long = "The time is 09:41." + " " * 3 + "x" * MAX_MATCHED_CHARS
    assert left_of(["times"], [said("system", far), said("system", long)])[1] == []


def is_removed(glob: str, line: str) -> bool:
    return left_of([glob], [said("system", line)])[1] == [glob]


@pytest.mark.parametrize(
    "source",
    ["Run [a-z]+-[a-z]+", r"Date: \d{4}.*", "Uptime: .*", "a.?", "(nonce|salt)=*", "^a$", "a+", "x{2,5}", "[abc]",
     "a|b", "", "x" * (MAX_PATTERN_CHARS + 1)],
)  # fmt: skip
def test_a_regular_expression_of_an_older_configuration_is_refused_with_what_to_write(source: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a name or a glob .* write \* for any text and \? for any"):
        StablePrefix([source])


@pytest.mark.parametrize(
    ("glob", "line"),
    [
        ("Date: ????-??-?? *", "Date: 2026-11-18 (a Wednesday)"),
        ("*day", "Wednesday"),
        ("Version 1.2?3", "Version 1.2.3"),
        ("*a*b*", "xxaxxbxx"),
        ("a*", "a"),
        ("costs ?5, *!", "costs $5, today!"),
        ("plain words", "  plain words\t"),
    ],
)
def test_a_glob_matches_whole_lines_without_the_space_around_them(glob: str, line: str) -> None:
    assert is_removed(glob, line)
    assert not is_removed(glob, line.strip() + "\x00.") or glob.endswith("*")
    assert not is_removed(glob, "\x00." + line.strip()) or glob.startswith("*")


@given(
    st.text(alphabet="ab*?", min_size=1, max_size=8),
    st.text(alphabet="ab", min_size=1, max_size=8),
)
def test_a_glob_matches_what_a_search_of_all_splits_finds(glob: str, line: str) -> None:
    def matches(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(matches(pattern[1:], text[at:]) for at in range(len(text) + 1))
        return bool(text) and pattern[0] in ("?", text[0]) and matches(pattern[1:], text[1:])

    assert is_removed(glob, line) == matches(glob, line)


@pytest.mark.parametrize(
    "glob",
    ["*a" * 99 + "*b", "*a?" * 66 + "b", f"*{'a' * 128}b*", f"*{'?' * 150}b", f"*{'a' * 98}*{'a' * 98}b"],
)
def test_the_worst_of_lines_and_globs_takes_little_time(glob: str) -> None:
    listed = StablePrefix([glob])
    text = "\n".join(["a" * MAX_MATCHED_CHARS] * MAX_LINES)
    began_s = process_time()
    assert not listed.remove_lines([said("system", text)])[1]
    assert process_time() - began_s < 1.0  # it takes some 30 ms; a matcher that goes back and tries again takes years


def test_too_many_patterns_are_refused() -> None:
    with raises_code(ConfigError, "too_many_patterns"):
        StablePrefix(["a"] * (MAX_PATTERNS + 1))
