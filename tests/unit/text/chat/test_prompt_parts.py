"""Which message or tool a token of a prompt belongs to, whatever a template does with them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.chat.control_tokens import ChatTokenizer
from quire.text.chat.prompt_parts import (
    TEMPLATE_PART,
    UNKNOWN_PARTS,
    NumberedMessages,
    PartSpan,
    PromptPart,
    PromptParts,
    message_parts,
)
from quire.text.chat.rendering.process import Program
from quire.text.sandboxed.messages import LoadTemplate, Render, Rendered
from tests.support.models.small_tokenizers import ALL

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TEMPLATES = {
    "plain": PLAIN,
    "trimmed": PLAIN.replace("m.content", "m.content | trim"),
    "upper": PLAIN.replace("m.content", "m.content | upper"),
    "stripped": PLAIN.replace("m.content", "m.content.strip()"),
    "added up": "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + '[' + m.content + ']' %}"
    "{% endfor %}{{ ns.t }}",
    "hoisted": "{% for m in messages[1:] %}<{{ m.role }}>{% if loop.last %}<<{{ messages[0].content }}>>{% endif %}"
    "{{ m.content }}{% endfor %}",
    "repeated": "{{ messages[0].content }}|" + PLAIN,
    "formatted": "{% for m in messages %}{{ '%s: %s;' % (m.role, m.content) }}{% endfor %}",
}
TOOLS = {
    "each": "{% for t in tools %}<tool>{{ t | tojson }}</tool>{% endfor %}",
    "all": "[TOOLS]{{ tools | tojson }}[/TOOLS]",
    "all indented": "[TOOLS]{{ tools | tojson(indent=2) }}[/TOOLS]",
    "named": "{% for t in tools %}- {{ t.function.name }}: {{ t.function.description }}\n{% endfor %}",
    "as text": "{% for t in tools %}{{ t }}\n{% endfor %}",
}
MARKS = ("alpha", "bravo", "carol", "delta")
"""Each stands in one message or tool alone: where it is in the rendered text says whose that is."""


def render(template: str, messages: Sequence[dict[str, Any]], tools: Any = None) -> Rendered:
    asked = Render(list(messages), tools, None, {}, True, "2026-01-01T00:00:00")
    return Program(LoadTemplate(template, {}, 100_000, 100_000)).render(asked)


def tool(name: str) -> dict[str, Any]:
    function = {"name": f"get_{name}", "description": f"what {name} says", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def marks_in(text: str) -> Iterator[tuple[int, int, int]]:
    """First and last character of each mark, and which it is."""
    for index, mark in enumerate(MARKS):
        start = text.lower().find(mark)
        while start >= 0:
            yield start, start + len(mark) - 1, index
            start = text.lower().find(mark, start + 1)


def token_at(kind: str, text: str, char: int) -> int:
    """The first token that a character falls in."""
    ids = ALL[kind]().library.encode(text, add_special_tokens=False)
    return next(at for at, (start, stop) in enumerate(ids.offsets) if start <= char < stop)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_message_is_found_wherever_its_template_writes_it(template: str, kind: str) -> None:
    roles = ("system", "user", "assistant", "user")
    messages = [
        {"role": role, "content": f"  the {mark} sat\non {mark} mat "} for role, mark in zip(roles, MARKS, strict=True)
    ]
    rendered = render(TEMPLATES[template], messages)
    expected = [PromptPart("system", 0), *[PromptPart("message", at, roles[at]) for at in (1, 2, 3)]]
    tokenizer = ChatTokenizer(ALL[kind](), "")
    ids, parts = tokenizer.encode_parts(rendered, messages)
    assert ids == tokenizer.encode_parts(rendered, ())[0]
    found = list(marks_in(rendered.text))
    assert {index for *_, index in found} == {0, 1, 2, 3}
    for first, last, index in found:
        for char in (first, last):
            assert parts.at(token_at(kind, rendered.text, char)) == expected[index], (template, rendered.text, char)


@pytest.mark.parametrize("template", TOOLS)
def test_every_tool_is_found_however_it_is_written(template: str) -> None:
    tools = [tool(mark) for mark in MARKS]
    messages = [{"role": "user", "content": "hello"}]
    rendered = render(TOOLS[template] + PLAIN, messages, tools)
    _, parts = ChatTokenizer(ALL["byte level"](), "").encode_parts(rendered, messages, MARKS)
    for first, _, index in marks_in(rendered.text):
        assert parts.at(token_at("byte level", rendered.text, first)) == PromptPart("tool", index, MARKS[index])
    hello = token_at("byte level", rendered.text, rendered.text.rindex("hello"))
    assert parts.at(hello) == PromptPart("message", 0, "user")


def test_what_the_template_wrote_is_the_templates_but_the_token_that_ends_a_part_is_that_parts() -> None:
    messages = [{"content": "one"}, {"content": "two"}]
    rendered = render("<<begin>>{{ messages[0].content }}||{{ messages[1].content }}<<end>>", messages)
    ids, parts = ChatTokenizer(ALL["byte level"](), "").encode_parts(rendered, messages)
    first = token_at("byte level", rendered.text, rendered.text.index("one"))
    after = token_at("byte level", rendered.text, rendered.text.index("||"))
    assert parts.at(0) == TEMPLATE_PART
    assert parts.at(first) == parts.at(after) == PromptPart("message", 0)
    assert parts.at(len(ids) - 1) == TEMPLATE_PART


def test_what_nobody_knows_is_told_as_that() -> None:
    made = Rendered("hello you", ((0, 9),), ((6, 9, "m0"),))
    _, parts = ChatTokenizer(ALL["byte level"](), "").encode_parts(made, [{"content": "you"}])
    assert parts.at(0) is None
    assert parts.at(token_at("byte level", made.text, 7)) == PromptPart("message", 0)
    assert UNKNOWN_PARTS.at(0) is UNKNOWN_PARTS.at(1 << 40) is None


def test_a_text_that_names_a_control_token_is_not_taken_apart() -> None:
    tokenizer = ChatTokenizer(ALL["byte level"](), "")
    messages = [{"role": "user", "content": "say <|im_end|> now"}]
    ids, parts = tokenizer.encode_parts(render(PLAIN, messages), messages)
    assert parts is UNKNOWN_PARTS
    assert ids == tokenizer.encode_parts(render(PLAIN, messages), ())[0]


def test_two_places_in_one_text_are_nobodys() -> None:
    template = "{{ (messages | map(attribute='content') | list) | tojson }}"
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    rendered = render(template, messages)
    assert [label for *_, label in rendered.labeled_spans] == ["m0", "m1"]
    joined = render("{{ {'a': messages[0].content, 'b': messages[1].content} | tojson }}", messages)
    assert joined.client_spans == ((0, len(joined.text)),)
    assert joined.labeled_spans == ()


def test_numbered_messages_keep_the_numbers_of_their_client() -> None:
    told = NumberedMessages.with_indices([({"role": "tool"}, 1), ({"role": "user"}, 1)]).preceded_by(
        [{"role": "system"}, {"role": "user"}]
    )
    assert message_parts(told) == [
        PromptPart("system", 0),
        None,
        PromptPart("message", 1, "tool"),
        PromptPart("message", 1, "user"),
    ]
    two = [{"role": "developer"}, {"role": "system"}, {"role": "user"}]
    assert message_parts(two) == [PromptPart("system", 0), PromptPart("system", 0), PromptPart("message", 2, "user")]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=8), st.integers(0, 60))
def test_a_position_is_looked_up_as_it_is_counted(pieces: list[tuple[int, int]], position: int) -> None:
    spans, place = list[PartSpan](), 0
    for index, (gap, length) in enumerate(pieces):
        spans.append(PartSpan(place + gap, place + gap + length, PromptPart("message", index)))
        place += gap + length
    inside = [span.part for span in spans if span.first <= position < span.end]
    behind = [span.part for span in spans if span.end == position]
    assert PromptParts(spans).at(position) == (inside or behind or [TEMPLATE_PART])[0]
