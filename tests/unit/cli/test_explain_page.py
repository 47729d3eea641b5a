"""An explanation as a person reads it: the texts under each other, the difference marked without colour."""

from typing import Any

import pytest
from rich.cells import cell_len

from quire.cli.chat.explain_page import explanation_page, part_words, request_page

DIFFERENCE = {
    "position": 36,
    "token_id": 14801,
    "token": " Tuesday",
    "cached_token_id": 12397,
    "cached_token": " Monday",
    "before": "you answer in one or two friendly sentences. Today is",
    "after": " Tuesday, and the library is open from nine to five",
    "cached_after": " Monday, and the library is open from nine to five",
}


def uncoloured(text: str, _colour: str) -> str:
    return text


def page(found: dict[str, Any], width: int) -> str:
    return explanation_page(found, width, uncoloured)


def told(**more: Any) -> dict[str, Any]:
    found = {
        "prompt_tokens": 73,
        "cached_tokens": 32,
        "reason": "diverged",
        "explanation": "the prompt differs from what is cached at token 36",
        "part": {"kind": "system", "index": 0, "name": None},
        "lost_tokens": 40,
        "difference": DIFFERENCE,
    }
    return found | more


def test_the_texts_stand_under_each_other_and_the_mark_under_the_difference() -> None:
    assert page(told(), 100).splitlines() == [
        "32 of 73 tokens are cached; 40 more could have been",
        "diverged: the prompt differs from what is cached at token 36, in the system text",
        "",
        "  prompt  …r in one or two friendly sentences. Today is[ Tuesday], and the library is open from nin…",
        "  cached  …r in one or two friendly sentences. Today is[ Monday], and the library is open from nine…",
        "                                                       ^^^^^^^^^^",
        "prompt: ' Tuesday' (14801), cached: ' Monday' (12397)",
    ]


@pytest.mark.parametrize("width", [1, 40, 57, 80, 300])
@pytest.mark.parametrize("word", ["Tuesday", "火曜日", "a\x1b[31mb\nc", "👍🏽" * 9, "x" * 400])
def test_no_line_is_wider_than_the_terminal_but_for_the_difference_itself(word: str, width: int) -> None:
    found = {**DIFFERENCE, "token": word, "after": f"{word} and then on and on", "before": "今日は" * 20}
    lines = page(told(difference=found), width).splitlines()
    prompt, cached, mark = lines[3:6]
    assert all(line.isprintable() for line in lines)
    assert cell_len(cached) <= max(width, 40)
    assert cell_len(prompt[: prompt.index("[")]) == cell_len(cached[: cached.index("[")]) == mark.index("^")
    bracket = prompt[prompt.index("[") : prompt.rindex("]") + 1]
    assert cell_len(prompt) <= max(width, 40, mark.index("^") + cell_len(bracket))


def test_colour_comes_on_top_of_the_marks() -> None:
    coloured = explanation_page(told(), 100, lambda text, colour: f"<{colour}>{text}</>")
    assert "<green>[ Tuesday]</>" in coloured
    assert "<red>[ Monday]</>" in coloured
    assert "<yellow>^^^^^^^^^^</>" in coloured


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (None, ""),
        ({"kind": "tool", "index": 1, "name": "search"}, "in tool 1 (search)"),
        ({"kind": "message", "index": 3, "name": "user"}, "in message 3 (user)"),
        ({"kind": "message", "index": 3, "name": None}, "in message 3"),
        ({"kind": "text", "index": 0, "name": None}, "in the prompt"),
        ({"kind": "text", "index": 0, "name": "template"}, "in the text of the chat template"),
    ],
)
def test_a_part_is_named(part: dict[str, Any] | None, words: str) -> None:
    assert part_words(part) == words
    assert page(told(part=part), 100).splitlines()[1].endswith(f", {words}" if words else "36")


def test_a_request_has_a_head_and_all_its_prompts() -> None:
    seen = {"request_id": "req-1", "model": "tiny", "seconds_ago": 12.3}
    one = told(difference=None, reason="too_short", explanation="nothing is missing", part=None, lost_tokens=0)
    assert request_page({**seen, "prompts": [one]}, 100, uncoloured).splitlines() == [
        "request req-1, tiny, 12 s ago",
        "",
        "32 of 73 tokens are cached",
        "too_short: nothing is missing",
    ]
    assert "prompt 2 of 2: 32 of 73" in request_page({**seen, "prompts": [one, one]}, 100, uncoloured)


def test_the_operator_is_told_that_texts_are_another_tenants() -> None:
    assert page(told(difference={"position": 36}), 100).endswith("the texts belong to another tenant")
