"""Prose in Markdown wraps at 100 columns, so that a change shows what it changes. Programs and tables may be wider."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
PAGES += sorted((ROOT / ".github").rglob("*.md"))
WIDTH = 100
FENCE = re.compile(r"\s*(?:>\s*)*(`{3,}|~{3,})")
OPENS_BLOCK = re.compile(r"\s*(?:>\s*)*(#|\||\[[^]]+\]:\s)")
"""A heading, a row of a table, the target of a link."""
MARKS = re.compile(r"\s*(?:(?:[-*+]|\d+[.)]|>)\s+)*")
"""What a list or a quotation puts before the first word of a line."""


def prose(markdown: str) -> Iterator[tuple[int, str]]:
    """Every line that could be cut, with its number: no code, no comment, no front matter, no table, no heading."""
    lines = markdown.splitlines()
    end = _end_of_front_matter(lines)
    fence, in_comment, is_in_list, is_after_blank = "", False, False, True
    for number, line in enumerate(lines[end:], end + 1):
        found, was_fenced = FENCE.match(line), bool(fence)
        if found and (not fence or line.strip() == fence):
            fence = "" if fence else found[1]
        if was_fenced or fence:
            continue
        in_comment |= line.lstrip().startswith("<!--")
        is_code = line.startswith("    ") and is_after_blank and not is_in_list
        if line.strip() and not is_code:
            is_in_list = bool(re.match(r"\s*([-*+]|\d+[.)])\s", line)) or (is_in_list and line.startswith(" "))
            if not in_comment and not OPENS_BLOCK.match(line):
                yield number, line
        is_after_blank = not line.strip() or is_code
        in_comment &= "-->" not in line


def _end_of_front_matter(lines: list[str]) -> int:
    return lines.index("---", 1) + 1 if lines[:1] == ["---"] else 0


def too_long(markdown: str) -> list[int]:
    """Numbers of the lines of prose that should have been cut. One word alone cannot be: links have no spaces."""
    return [
        number
        for number, line in prose(markdown)
        if len(line) > WIDTH and len(MARKS.sub("", line, count=1).split()) > 1
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_longer_than_a_hundred(page: Path) -> None:
    assert too_long(page.read_text()) == []


LONG = "word " * 25
LINK = f"[test](https://example.org/{'x' * 100})."


@pytest.mark.parametrize(
    "line",
    [
        LONG,
        f"- {LONG}",
        f"  1. {LONG}",
        f"> {LONG}",
        f"see {LINK}",
        f"**{LONG.strip()}**",
        f"- item\n\n    {LONG}",
        f"text\n    {LONG}",
        f"```\ncode\n```\n{LONG}",
        f"```\n~~~\n```\n{LONG}",
        f"<!-- comment -->\n{LONG}",
        f"    code\n\n{LONG}",
        "é" * 50 + " " + "é" * 50,
    ],
)
def test_a_long_line_of_prose_is_found_wherever_it_stands(line: str) -> None:
    assert too_long(f"# Title\n\n{line}\n") == [2 + len(line.splitlines())]


@pytest.mark.parametrize(
    "line",
    [
        LONG[:100],
        f"# {LONG}",
        f"| {LONG} | {LONG} |",
        f"```console\n$ {LONG}\n```",
        f"~~~\n```\n{LONG}\n~~~",
        f"    {LONG}\n    {LONG}",
        LINK,
        f"- {LINK}",
        f"  {LINK}",
        f"[name]: {LINK}",
        f"<!-- {LONG}\n{LONG} -->",
        "é" * 49 + " " + "é" * 50,
    ],
)
def test_what_cannot_or_need_not_be_cut_is_let_through(line: str) -> None:
    assert too_long(f"# Title\n\n{line}\n") == []


def test_front_matter_is_no_prose_and_what_follows_it_is() -> None:
    page = f"---\nabout: {LONG}\n---\n{LONG}\n"
    assert too_long(page) == [4]
