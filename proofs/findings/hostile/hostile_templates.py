"""Chat templates that burn time or memory, drawn by seed: each family has its own way to make much of little source."""

from random import Random

SHOWN = "{{ messages[0].content }}"

FAMILIES: dict[str, str] = {
    "squaring": "{% set n = namespace(x=N) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "cubing": "{% set n = namespace(x=N) %}{% for i in range(60) %}{% set n.x = n.x * n.x * n.x %}{% endfor %}",
    "replace": "{% set a = 'a' * M %}{{ a.replace('a', a[:5000]) | length }}",
    "replace filter": "{% set a = 'a' * M %}{{ a | replace('a', a[:5000]) | length }}",
    "replace twice": "{% set a = 'ab' * M %}{{ a.replace('a', a[:900]).replace('b', a[:900]) | length }}",
    "join": "{% set a = 'a' * M %}{% for i in range(K) %}{% set b = a.join(a) %}{{ b | length }}{% endfor %}",
    "join filter": "{% set a = 'a' * M %}{{ a | join('b' * 5000) | length }}",
    "nested loops": ("{% for i in range(90000) %}{% for j in range(90000) %}{% for k in range(9) %}x{% endfor %}"
        "{% endfor %}{% endfor %}"),
    "percent": "{{ ('%1999999999d' % N) | length }}",
    "percent text": "{{ ('%999999999s' % 'x') | length }}",
    "format": "{{ '{:>1999999999}'.format(N) | length }}",
    "format filter": "{{ ('%1999999999s' | format('x')) | length }}",
    "center": "{{ ('x' | center(1999999999)) | length }}{{ 'x'.center(1999999999) | length }}",
    "ljust": "{{ 'x'.ljust(1999999999) | length }}{{ 'x'.rjust(1999999999).zfill(1999999999) | length }}",
    "zfill": "{% for i in range(K) %}{{ 'x'.zfill(400000000) | length }}{% endfor %}",
    "indent": "{% set a = 'a\\n' * M %}{{ a | indent(50000) | length }}",
    "wordwrap": "{% set a = 'ab ' * M %}{% for i in range(99) %}{{ a | wordwrap(2) | length }}{% endfor %}",
    "wordcount": "{% set a = 'ab ' * M %}{% for i in range(9999) %}{{ a | wordcount }}{% endfor %}",
    "split": "{% set a = 'ab ' * M %}{% for i in range(9999) %}{{ a.split() | length }}{% endfor %}",
    "sort": "{% set a = 'ba' * M %}{% for i in range(999) %}{{ a | sort | length }}{% endfor %}",
    "list": "{% set a = 'a' * M %}{% for i in range(999) %}{{ (a | list) * 9 | length }}{% endfor %}",
    "batch": "{% for i in range(9999) %}{{ range(99999) | batch(2) | list | length }}{% endfor %}",
    "sum": "{{ ([range(99999) | list] * 99999) | sum(start=[]) | length }}",
    "tojson": "{% set a = [0] * M %}{% for i in range(999) %}{{ a | tojson(indent=4000) | length }}{% endfor %}",
    "pprint": "{% set a = range(99999) | list %}{% for i in range(99) %}{{ a | pprint | length }}{% endfor %}",
    "urlize": "{% set a = 'http://a.b ' * M %}{% for i in range(99) %}{{ a | urlize | length }}{% endfor %}",
    "striptags": "{% set a = '<' * M %}{{ a | striptags | length }}",
    "title": "{% set a = 'a ' * M %}{% for i in range(999) %}{{ a | title | length }}{% endfor %}",
    "unique": "{% set a = range(99999) | list %}{% for i in range(999) %}{{ a | unique | list | length }}{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "dicts": ("{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}"
        "{% endfor %}{{ n.x | tojson }}"),
    "in": "{% set a = 'a' * M %}{% for i in range(99999) %}{{ (a + 'b') in (a + a) }}{% endfor %}",
    "count": "{% set a = 'a' * M %}{% for i in range(99999) %}{{ a.count('aab') + a.find('b') }}{% endfor %}",
    "translate": ("{% set a = 'a' * M %}{% for i in range(9999) %}{{ a.translate({97: 'b' * 9999}) | length }}"
        "{% endfor %}"),
    "expandtabs": "{{ ('\\t' * M).expandtabs(999999) | length }}",
    "encode": "{% set a = 'é' * M %}{% for i in range(99999) %}{{ a.encode('utf-16') | length }}{% endfor %}",
    "lipsum": "{% for i in range(9999) %}{{ lipsum(n=999) | length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "blocks": ("{% set a %}{% for i in range(90000) %}{{ 'x' * 80 }}{% endfor %}"
        "{% endset %}{{ a.replace('x', a) | length }}"),
    "output": "{% for i in range(90000) %}{{ 'x' * M }}{% endfor %}",
    "shift": ("{% set n = namespace(x=N) %}{% for i in range(9999) %}"
        "{% set n.x = n.x * 99999999999999999999 %}{{ n.x }}{% endfor %}"),
    "division": ("{% set n = namespace(x=N) %}{% for i in range(22) %}{% set n.x = n.x * n.x %}{% endfor %}"
        "{% for i in range(9999) %}{{ n.x // 7 }}{% endfor %}"),
}  # fmt: skip


def templates(count: int) -> list[tuple[str, str]]:
    """(family, source) pairs; half of the templates burn when they are loaded, the others when they render "hello"."""
    pairs = []
    for index in range(count):
        random = Random(index)
        family = [*FAMILIES][index % len(FAMILIES)]
        numbers = {"N": random.randint(3, 99), "M": random.choice([200_000, 900_000, 2_000_000]), "K": 99}
        source = FAMILIES[family]
        for letter, value in numbers.items():
            source = _replace_letter(source, letter, value)
        at_render = "{% if messages[0].content == 'hello' %}" + source + "{% endif %}" + SHOWN
        pairs.append((family, source if index // len(FAMILIES) % 2 else at_render))
    return pairs


def _replace_letter(source: str, letter: str, value: int) -> str:
    for before, after in (("(", ")"), ("=", ")"), (" ", " "), (" ", ")")):
        source = source.replace(f"{before}{letter}{after}", f"{before}{value}{after}")
    return source.replace(f"* {letter}", f"* {value}").replace(f"% {letter}", f"% {value}")
