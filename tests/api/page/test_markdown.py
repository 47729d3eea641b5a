"""What the page makes of a model's Markdown, by the page's own code: elements we know, and text for everything else."""

import json
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "src" / "quire" / "api" / "page" / "markdown.js"
PROBE = ROOT / "tests" / "support" / "markdown_probe.mjs"
NODE = shutil.which("node")
KNOWN = {
    *("p", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "div", "span", "button", "pre", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "strong", "em", "a"),
}
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](data:text/html,<b>)",
    "![x](https://elsewhere.example/a.png)",
    "[x](//elsewhere.example)",
    "<a href='https://elsewhere.example'>x</a>",
    "`<b>`",
    '[x](https://elsewhere.example/"onclick="alert(1))',
    "```html\n<script src=https://elsewhere.example></script>\n```",
    "| <b> | ![](https://elsewhere.example) |\n|---|---|\n| **<i>** | x |",
)
MARKS = (
    "*",
    "**",
    "`",
    "```\n",
    "[",
    "](",
    ")",
    "#",
    "# ",
    "> ",
    "- ",
    "1. ",
    "|",
    "|-",
    "\n",
    "\n\n",
    "  ",
    "a",
    "<b>",
)

pytestmark = pytest.mark.skipif(NODE is None, reason="the page's code is run by node")


def read(texts: list[str]) -> list[Any]:
    """What the page makes of each."""
    words = [str(NODE), str(PROBE), str(MODULE)]
    ran = subprocess.run(words, input=json.dumps(texts), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


def elements(nodes: list[Any]) -> list[Any]:
    """All of them, whatever stands in whatever."""
    inside = [one for one in nodes if isinstance(one, list)]
    return [*inside, *[deeper for _, _, children in inside for deeper in elements(children)]]


def words_of(nodes: list[Any]) -> str:
    """Their text."""
    return "".join(one if isinstance(one, str) else words_of(one[2]) for one in nodes)


def plain(nodes: list[Any]) -> str:
    """As short marks, for eyes."""
    return "".join(one if isinstance(one, str) else f"<{one[0]}>{plain(one[2])}</{one[0]}>" for one in nodes)


def test_what_people_write_is_shown_as_they_mean_it() -> None:
    cases = {
        "# Hi\n\nSome **bold** and *soft* `code`.": (
            "<h3>Hi</h3><p>Some <strong>bold</strong> and <em>soft</em> <code>code</code>.</p>"
        ),
        "- a\n- b\n  1. c": "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul>",
        "> q\n\nr": "<blockquote><p>q</p></blockquote><p>r</p>",
        "|a|b|\n|-|-|\n|1|2|": (
            "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
        ),
        "2 * 3 * 4 and a ** b": "<p>2 * 3 * 4 and a ** b</p>",
    }
    assert [plain(one["nodes"]) for one in read([*cases])] == [*cases.values()]


def test_nothing_a_model_writes_becomes_markup_or_is_asked_of_another_host() -> None:
    random = Random(7)
    texts = [*HOSTILE, *["".join(random.choices((*HOSTILE, *MARKS), k=12)) for _ in range(300)]]
    for text, told in zip(texts, read(texts), strict=True):
        for name, attributes, _ in elements(told["nodes"]):
            assert name in KNOWN, (name, text)
            assert set(attributes) <= {"class", "type", "tabindex", "start", "href", "rel", "target"}, attributes
            if "href" in attributes:
                assert attributes["href"].lower().startswith(("http://", "https://"))
                assert attributes["rel"] == "noopener noreferrer"


def test_no_word_is_lost() -> None:
    random = Random(11)
    texts = [" ".join(random.choice(MARKS) + f"word{at}" for at in range(20)) for _ in range(200)]
    for text, told in zip(texts, read(texts), strict=True):
        shown = words_of(told["nodes"])
        assert [f"word{at}" for at in range(20) if f"word{at}" not in shown] == [], text


def test_no_text_takes_long_to_read() -> None:
    texts = [mark * 20_000 for mark in MARKS] + [one * 4_000 for one in ("**a", "*a ", "[a](", "`a``b", "> - ", "|-\n")]
    slow = {text[:20]: told["ms"] for text, told in zip(texts, read(texts), strict=True) if told["ms"] > 2_000}
    assert not slow
