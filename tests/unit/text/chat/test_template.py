"""Messages to a prompt: what published templates expect, and what none may do."""

from datetime import datetime
from typing import Any

import pytest

from quire.errors import CheckpointError, InvalidTextError, TemplateError
from quire.text.chat.rendering import template as chat_template
from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments
from tests.support.errors import raises_code

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' ~ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content if part.type == 'text' %}[{{ part.text }}]{% endfor %}{% endfor %}"
)

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages or HELLO, TemplateArguments(**arguments)).text


def test_a_chat_ends_where_the_assistant_begins() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% for m in messages %}\nx\n  {% endfor %}\n{% endif %}\n") == "x\n"


def test_special_tokens_functions_and_loop_controls_are_there() -> None:
    assert render("{{ eos_token }}") == "</s>"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    clock = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert clock.render(HELLO).text == "26 Jul 2024"


def test_json_is_written_for_a_model_and_not_for_a_browser() -> None:
    tools = [{"type": "function", "function": {"name": "é", "description": "<a> & 'b'"}}]
    assert render("{{ tools[0].function | tojson }}", tools=tools) == '{"name": "é", "description": "<a> & \'b\'"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_what_was_not_given_is_none_or_undefined_as_templates_expect() -> None:
    source = "{{ tools is none }} {{ documents is none }} {{ enable_thinking is defined }}"
    assert render(source) == "True True False"
    assert render(source, enable_thinking=False, tools=[{}], documents=[{}]) == "False False True"


def test_text_parts_are_joined_for_a_template_that_expects_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


def test_a_text_becomes_a_part_for_a_template_that_expects_parts() -> None:
    assert render(PARTS_ONLY) == "[hello]"


def test_a_template_that_shows_neither_is_given_texts() -> None:
    assert render("{{ messages[1].content }}", [*HELLO, {"role": "assistant", "content": "yes"}]) == "yes"


def test_absent_content_is_an_empty_text() -> None:
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
    ):
        assert render("<{{ messages[0].content + '' }}>", [message]) == "<>"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"content": "x"}, "role_missing"),
        ({"role": "user", "content": 5}, "invalid_content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "unsupported_message_part"),
        ({"role": "user", "content": ["x"]}, "unsupported_message_part"),
        ({"role": "user", "content": [{"type": "text"}]}, "unsupported_message_part"),
        ({"role": "assistant", "content": "x", "tool_calls": 7}, "invalid_tool_calls"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "invalid_tool_calls"),
    ],
)
def test_a_message_that_no_template_could_show_is_refused(message: dict[str, Any], code: str) -> None:
    with raises_code(InvalidTextError, code):
        render(CHATML, [message])


def test_a_chat_without_messages_is_refused() -> None:
    with raises_code(InvalidTextError, "no_messages"):
        ChatTemplate(CHATML, {}).render([])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        ("not json", '"not json"'),
        ("[1]", '"[1]"'),
        (None, "{}"),
        ("", "{}"),
    ],
)
def test_arguments_of_tool_calls_are_read_so_that_a_template_writes_them_once(arguments: object, shown: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == shown


def test_a_final_message_is_continued_where_its_text_ends() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Yes, "}]
    plain = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert render(plain, messages, continue_final_message=True) == "<hello><Yes, "
    assert render(CHATML, messages, continue_final_message=True).endswith("assistant\nYes,")
    assert render(PARTS_ONLY, messages, continue_final_message=True) == "[hello][Yes, "


def test_what_cannot_be_continued_is_refused() -> None:
    with raises_code(TemplateError, "two_final_messages"):
        render(CHATML, continue_final_message=True, add_generation_prompt=True)
    with raises_code(InvalidTextError, "invalid_text"):
        render(PARTS_ONLY, [{"role": "assistant", "content": []}], continue_final_message=True)
    with raises_code(TemplateError, "final_message_missing"):
        render("always the same", continue_final_message=True)


def test_extra_arguments_go_by_the_allow_list() -> None:
    source = "{{ reasoning_effort }} {{ enable_thinking }}"
    assert render(source, extra={"reasoning_effort": "low", "enable_thinking": True}) == "low True"
    for name in ("messages", "eos_token", "tokenize", "chat_template", "raise_exception"):
        with raises_code(TemplateError, "unknown_template_argument"):
            render(source, extra={name: "x"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'role': 'x'}) }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "recursion"),
        ("{{ cycler().next() }}", "at least one item"),
        ("{{ range(10000000) }}", "Range too big"),
    ],
)
def test_whatever_a_template_does_wrong_refuses_the_request(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) if false %}{% endfor %}",
        "{% set count_step = 1 %}{% macro f() %}{% endmacro %}{% for i in range(1000) %}{{ f() }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(1000) %}{% call f() %}{% endcall %}{% endfor %}",
    ],
)
def test_a_template_runs_only_so_many_steps(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 500)
    with raises_code(TemplateError, "too_many_steps"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000) %}xx{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ 1000000000000 * [1] }}",
        "{% set n = namespace(x='ab') %}{% for i in range(20) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(20) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(20) %}{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_a_template_makes_only_so_much_text(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    with raises_code(TemplateError, "prompt_too_long"):
        ChatTemplate(source, {}).render(HELLO)


def test_numbers_stay_small() -> None:
    with raises_code(TemplateError, "power_in_template"):
        render("{{ 9 ** 9 }}")


def test_a_template_cannot_reset_what_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 50)
    source = "{% set context = {} %}{% set meter_of = none %}{% for i in range(99) %}{% set self = 1 %}{% endfor %}"
    with raises_code(TemplateError, "too_many_steps"):
        render(source)


def test_counting_changes_nothing_that_is_shown() -> None:
    source = (
        "{% macro show(x, y=2) %}{{ x ~ y ~ none ~ missing ~ 1.5 }}{% endmacro %}"
        "{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}/{{ loop.length }}{{ show(i) }}{% else %}none{% endfor %}"
        "{% for i in [] %}x{% else %}empty{% endfor %}{{ 2 * 3 + 1 }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ 7 % 4 }}"
    )
    assert render(source) == "1/212None1.52/232None1.5empty7[1, 2]abab3"


def test_marks_for_trainers_are_passed_over() -> None:
    assert render("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}") == "aFalse"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{% endfor %}"])
def test_a_template_that_does_not_compile_is_refused_at_load_with_its_line(source: str) -> None:
    with raises_code(CheckpointError, "template_not_compiled") as refused:
        ChatTemplate("\n" + source, {})
    assert "at line 2" in str(refused.value)


def test_a_template_that_is_not_one_text_or_too_long_is_refused_at_load() -> None:
    named: Any = [{"name": "default", "template": "x"}]
    with raises_code(CheckpointError, "template_not_string"):
        ChatTemplate(named, {})
    with raises_code(CheckpointError, "template_too_long"):
        ChatTemplate("x" * 1_000_001, {})
