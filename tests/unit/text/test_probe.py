"""Reading off a template how a model writes thoughts and calls. The templates here are ours, in the ways of others."""

import pytest

from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments
from quire.text.parsers.probe import PROBE_TOOL, reasoning_format, tool_format
from quire.text.parsers.tool_format import DEEPSEEK, HARMONY, HERMES, ReasoningFormat, ToolFormat
from tests.support.servers.tool_formats import FORMATS

HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
EACH = "{% for c in m.tool_calls %}"
TAGS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
KIND = "{{ 'text' if v is string else 'json' }}"
TEMPLATES = {
    "hermes": EACH
    + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    + ARGUMENTS
    + "}\n</tool_call>{% endfor %}",
    "tagged": EACH
    + "\n<tool_call>\n<function={{ c.function.name }}>"
    + TAGS
    + "\n<parameter={{ k }}>\n"
    + VALUE
    + "\n</parameter>{% endfor %}\n</function>\n</tool_call>{% endfor %}",
    "attributes": "{% if m.tool_calls %}<calls>\n"
    + EACH
    + '<invoke name="{{ c.function.name }}">'
    + TAGS
    + '\n<argument name="{{ k }}" kind="'
    + KIND
    + '">'
    + VALUE
    + "</argument>{% endfor %}\n</invoke>\n{% endfor %}</calls>{% endif %}",
    "list": "{% if m.tool_calls %}[TOOL_CALLS]["
    + EACH
    + '{"name": "{{ c.function.name }}", "arguments": '
    + ARGUMENTS
    + ', "id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]{% endif %}',
    "ids": EACH + "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS + "{% endfor %}",
    "bare": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    + EACH
    + '{"name": "{{ c.function.name }}", "parameters": '
    + ARGUMENTS
    + "}{% endfor %}",
    "fenced": "{% if m.tool_calls %}<begin>"
    + EACH
    + '{{ "" if loop.first else "\\n" }}<call>function<sep>{{ c.function.name }}\n```json\n'
    + ARGUMENTS
    + "\n```</call>{% endfor %}<end>{% endif %}",
}


def found(source: str) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    # A line break behind a block is the template's own layout, unless it is written as a text.
    template = ChatTemplate(source.replace("%}\n", "%}{{ '\\n' }}"), {"eos_token": "<|end|>"})

    def render(messages: object, begins: bool) -> str:
        return template.render(messages, TemplateArguments(tools=[PROBE_TOOL], add_generation_prompt=begins)).text  # type: ignore[arg-type]

    try:
        return tool_format(render, template.text, ["<|end|>"]), reasoning_format(render, template.text)
    finally:
        template.close()


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    assert found(HEAD + TEMPLATES[name] + TAIL) == (FORMATS[name], None)


@pytest.mark.parametrize(
    "calls",
    [
        "",
        EACH + '<call n="{{ loop.index }}">{{ c.function.name }}:' + ARGUMENTS + "</call>{% endfor %}",
        EACH + "{{ c.function.name }}:{{ loop.index }}" + ARGUMENTS + "{% endfor %}",
        EACH + "<{{ c.function.name }}>" + ARGUMENTS + "</{{ c.function.name }}>{% endfor %}",
        EACH + "{{ c.function.name }}(" + TAGS + "{{ k }}={{ v }} {% endfor %}){% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_is_not_shown_counted_or_in_a_notation_of_its_own_is_unknown(calls: str) -> None:
    assert found(HEAD + "{% if m.role == 'assistant' %}" + calls + "{% endif %}" + TAIL)[0] is None


@pytest.mark.parametrize(
    ("template_text", "fmt"),
    [("<tool_call>", HERMES), (DEEPSEEK.marker, DEEPSEEK), ("<|channel|>analysis", HARMONY)],
)
def test_a_template_that_names_a_format_and_shows_no_call_has_that(template_text: str, fmt: ToolFormat) -> None:
    assert found(HEAD + TAIL + "{# " + template_text + " #}")[0] is fmt


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_between_the_tags_that_the_template_puts_around_them(field: str) -> None:
    shown = (
        "<|{{ m.role }}|>{% if m." + field + " %}<muse>\n{{ m." + field + " }}\n</muse>\n\n{% endif %}{{ m.content }}"
    )
    assert found("{% for m in messages %}" + shown + TAIL)[1] == ReasoningFormat("<muse>", "</muse>")


def test_a_template_that_only_ends_thoughts_has_the_usual_tags() -> None:
    assert found(HEAD + TAIL + "<think>\n\n</think>")[1] == ReasoningFormat("<think>", "</think>")


def test_tags_that_are_no_pair_are_no_thought() -> None:
    shown = "<|{{ m.role }}|>{% if m.thinking %}<a>{{ m.thinking }}<b>{% endif %}{{ m.content }}"
    assert found("{% for m in messages %}" + shown + TAIL)[1] is None


def test_a_prompt_is_inside_a_thought_if_it_ends_with_its_beginning() -> None:
    fmt = ReasoningFormat("<think>", "</think>")
    assert fmt.is_open("<|assistant|><think>\n")
    assert not fmt.is_open("<|assistant|><think>\n\n</think>\n\n")
