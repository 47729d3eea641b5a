"""Whatever a template does to a client's words, it is known afterwards which they are."""

from typing import Any

import pytest

from quire.text.chat.rendering.marked_text import MarkedText, mark
from quire.text.chat.rendering.metering import METER, WorkMeter
from quire.text.chat.rendering.sandbox import TemplateSandbox


def shown(source: str, **given: Any) -> str:
    """What is written, with the client's characters in brackets."""
    template, _ = TemplateSandbox().build_template(source)
    context = {"x": mark("ab"), "m": {"role": "user", **mark({"text": "a b", "n": 5})}, **given}
    text = TemplateSandbox.concat(template.generate({**context, METER: WorkMeter(1000, 10_000)}))
    spans = text.client_spans if isinstance(text, MarkedText) else ()
    for start, stop in reversed(spans):
        text = str.__str__(text)
        text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
    return text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # What templates do every day keeps who wrote what.
        ("<{{ x }}>", "<[ab]>"),
        ("{{ '<' + x + '>' }}", "<[ab]>"),
        ("{{ '<' ~ x ~ 1 ~ '>' }}", "<[ab]1>"),
        ("{{ x | trim }}|{{ x.strip() }}|{{ x | upper }}|{{ x | lower }}", "[ab]|[ab]|[AB]|[ab]"),
        ("{{ m.role + ':' + m.text }}", "user:[a b]"),
        ("{{ m['role'] ~ m.get('role') }}", "useruser"),
        ("{{ m.n }}", "5"),
        ("{{ '<|' ~ m.role ~ '|>' }}", "<|user|>"),
        ("{{ m.text.split(' ')[-1] }}!", "[b]!"),
        ("{% for one in m.text.split() %}<{{ one }}>{% endfor %}", "<[a]><[b]>"),
        ("{% for one in x %}{{ one }}.{% endfor %}", "[a].[b]."),
        ("{{ x[0] }}{{ x[:1] }}{{ x[::-1] }}", "[aaba]"),
        ("{{ ['<', x, '>'] | join('-') }}", "<-[ab]->"),
        ("{{ ', '.join([x, 'c']) }}", "[ab], c"),
        ("{{ '<T>' | replace('T', x) }}{{ '<T>'.replace('T', x) }}", "<[ab]><[ab]>"),
        ("{{ x | replace('a', 'c') }}", "c[b]"),
        ("{{ '%s and %s' % (x, 'c') }}|{{ '%s' | format(x) }}|{{ '%d%%' % 5 }}", "[ab] and c|[ab]|5%"),
        ("{{ '%(k)s!' % {'k': x} }}", "[ab]!"),
        ("{{ '<{}|{k}>'.format(x, k=7) }}", "<[ab]|7>"),
        ("{{ '<{k}>'.format_map({'k': x}) }}", "<[ab]>"),
        ("{% set y %}<{{ x }}>{% endset %}{{ y }}", "<[ab]>"),
        ("{% macro f(t) %}<{{ t }}>{% endmacro %}{{ f(x) }}{{ f('c') }}", "<[ab]><c>"),
        ("{% macro f() %}({{ caller() }}){% endmacro %}{% call f() %}{{ x }}!{% endcall %}", "([ab]!)"),
        ("{% filter trim %} <{{ x }}> {% endfilter %}", "<[ab]>"),
        ("{{ x | default('c') }}{{ nothing | default('c') }}", "[ab]c"),
        ("{{ [m, m] | map(attribute='role') | join(',') }}", "user,user"),
        ("{{ [m, m] | map(attribute='role') | list | first }}", "user"),
        ("{{ (x if x == 'ab' else 'no') + ('yes' if 'a' in x and x.startswith('ab') else '') }}", "[ab]yes"),
        ("{{ namespace(v=x).v ~ 'c' }}", "[ab]c"),
        ("{{ {'a': 'b'} | tojson }}", '{"a": "b"}'),
        ("{{ '<b>' | upper | trim | string }}", "<B>"),
        # What is not understood is the client's.
        ("{{ {'a': x} | tojson }}", '[{"a": "ab"}]'),
        ("{{ m | string }}", "[{'role': 'user', 'text': 'a b', 'n': 5}]"),
        ("{{ [x] }}{{ '<' ~ [x] }}", "[['ab']]<[['ab']]"),
        ("{{ ('<' + x) | indent }}", "[<ab]"),
        ("{{ '<' | center(3) }}{{ x | center(4) }}{{ x.center(4) }}", " < [ ab  ab ]"),
        ("{{ x | title }}{{ x | escape }}{{ x | urlencode }}{{ x | wordwrap }}", "[Ababab ab]".replace(" ", "")),
        ("{{ x.encode().decode() }}{{ x.zfill(4) }}", "[ab00ab]"),
        ("{{ '%10s' % x }}{{ '%r' % x }}", "[        ab'ab']"),
        ("{{ '{:>4}{!r}'.format(x, x) }}", "[  ab'ab']"),
        ("{{ x.format('c') }}{{ '<'.center(5, x[0]) }}", "[abaa<aa]"),
        ("{{ [x] | map('center', 4) | join }}", "[ ab ]"),
        ("{{ [[x]] | map('string') | first }}", "[['ab']]"),
        ("{{ x | trim | indent(2, first=true) }}", "[  ab]"),
        ("{{ x | list | string }}", "[['a', 'b']]"),
        ("{{ '<' | e + x }}", "[&lt;ab]"),
        ("{{ x * 2 + 'c' * 2 }}", "[abab]cc"),
        ("{% filter center(9) %}<{{ x }}>{% endfilter %}", "[   <ab>  ]"),
    ],
)
def test_marks_come_out_with_the_text(source: str, expected: str) -> None:
    assert shown(source) == expected


def test_marks_change_nothing_that_is_shown() -> None:
    source = "{{ x }}{{ x|length }}{{ x is string }}{{ x == 'ab' }}{{ 'a' in x }}{{ {'ab': 1}[x] }}{{ x|tojson }}"
    assert shown(source, x="ab") == shown(source).replace("[", "").replace("]", "")


def test_the_templates_own_text_is_known_with_its_escapes() -> None:
    _, own = TemplateSandbox().build_template("<a>{{ '\\u003cb>' }}{# <c> #}")
    assert "<a>" in own
    assert "<b>" in own
    assert "<c>" not in own
