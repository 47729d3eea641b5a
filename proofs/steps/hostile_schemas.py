"""Grammars that make much work out of few bytes: the hostile table of the design brief, and others by seed.

Each is what stands in a request's body beside its prompt. A family makes another kind of trouble: width, depth,
choices, references, patterns, numbers, what is no schema at all, and the same in the other notations.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from proofs.steps.schemas import FIFTY

MAX_BYTES = 60_000
"""Of what is made to be let in: a little less than a server takes."""
REPEATS = ("", "*", "+", "?", "{1,900}")
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
PIECES = (
    "(a?){N}a{N}", "((a|aa)+)+", ".*a.{M}", "(.{1,N}x){1,N}", "[^a]{N}", "(ab|a|b)*c{M}", "(x+x+)+y", "(a|b|ab)*N",
    ".{0,N}", r"(\d+|\w+)*z", r"[\p{L}\p{N}]{M}", "((((a*)*)*)*)*", "(a{0,M}){0,M}", "(foo|foobar|foob)*.{M}r",
)  # fmt: skip
"""N and M become numbers."""
UNKNOWN = {
    "if": {"type": "string"}, "not": {"type": "string"}, "uniqueItems": True, "contains": {"type": "integer"},
    "dependentSchemas": {"a": {}}, "propertyNames": {"pattern": "^a"}, "unevaluatedProperties": False,
    "dependentRequired": {"a": ["b"]}, "contentMediaType": "text/html", "$dynamicRef": "#x",
}  # fmt: skip
JUNK: tuple[Any, ...] = (None, True, -1, 0, 2**53, 1e300, 1.5e-300, "", "(", "\u0000", "\U0001f600", [], {}, [[]], [{}])


@dataclass(frozen=True, slots=True)
class HostileGrammar:
    """One of them."""

    name: str
    """And the seed that makes it again."""
    said: str
    """Members of a JSON object, as text: some cannot be written by a library that is careful."""

    def body(self, **other: Any) -> bytes:
        """A request for it."""
        return f"{json.dumps(other)[:-1]}, {self.said}}}".encode()


def _fields(**fields: Any) -> str:
    return json.dumps(fields)[1:-1]


def _asked(schema: Any) -> str:
    return _fields(response_format={"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}})


# -- the table ---------------------------------------------------------------------------------------------------------


def _optional(count: int, *, are_required: bool = False) -> dict[str, Any]:
    names = [f"p{at}" for at in range(count)]
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": names if are_required else []}


def _nested(depth: int, kind: str = "object") -> str:
    """Written by hand: this deep no library goes."""
    opened = '{"type": "object", "properties": {"a": ' if kind == "object" else '{"type": "array", "items": '
    closed = "}}" if kind == "object" else "}"
    schema = opened * depth + '{"type": "null"}' + closed * depth
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "deep", "schema": {schema}}}}}'


def _table() -> Iterator[tuple[str, str]]:
    for count in (1_000, 7_000, 10_000, 100_000):
        yield f"enum of {count} words", _asked({"enum": [f"w{at:x}" for at in range(count)]})
    for count in (100, 256, 300, 1_000, 2_000, 5_000):
        yield f"{count} optional properties", _asked(_optional(count))
        yield f"{count} required properties", _asked(_optional(count, are_required=True))
    for depth in (15, 29, 50, 100, 200, 5_000):
        yield f"{depth} objects in each other", _nested(depth)
        yield f"{depth} arrays in each other", _nested(depth, "array")
    patterns = ("(a?){60}a{60}", "((a|aa)+)+", ".*a.{20}", "(.{1,1000}x){1,1000}", ".*x.{12}.*x.{12}.*x.{12}")
    for pattern in (*patterns, "(?=a)b", "(?<!a)b", "(a"):
        yield f"the pattern {pattern}", _asked({"type": "string", "pattern": pattern})
        yield f"the expression {pattern}", _fields(regex=pattern)
    yield "maxLength 100,000", _asked({"type": "string", "maxLength": 100_000})
    yield "maxItems 10^6", _asked({"type": "array", "items": {}, "minItems": 1_000, "maxItems": 10**6})
    levels = {f"l{at}": {"anyOf": [{"$ref": f"#/$defs/l{at + 1}"}] * 2} for at in range(20)}
    yield "20 levels of anyOf", _asked({"$defs": {**levels, "l20": {"type": "null"}}, "$ref": "#/$defs/l0"})
    both = [{"anyOf": [{"properties": {f"p{at}": {"const": one}}} for one in (0, 1)]} for at in range(14)]
    yield "2^14 by allOf", _asked({"type": "object", "allOf": both})
    yield "a reference to itself", _asked({"$ref": "#"})
    yield "a reference to elsewhere", _asked({"$ref": "https://example.com/schema.json"})
    yield "a reference to nothing", _asked({"$ref": "#/$defs/none"})
    for name, value in UNKNOWN.items():
        yield f"the keyword {name}", _asked({"type": "object", name: value})
    yield "minimum above maximum", _asked({"type": "integer", "minimum": 2, "maximum": 1})
    yield "oneOf that overlaps", _asked({"oneOf": [{"type": "integer"}, {"type": "number"}]})


TABLE = tuple(HostileGrammar(name, said) for name, said in _table())


# -- by seed -----------------------------------------------------------------------------------------------------------


def _simple(random: Random) -> dict[str, Any]:
    kind = random.choice(KINDS)
    return random.choice([{}, {"type": kind}, {"const": random.randint(0, 9)}, {"enum": ["a", "ab", None]}])


def _expression(random: Random) -> str:
    made = "".join(random.choice(PIECES) for _ in range(random.randint(1, 5)))
    return made.replace("N", str(random.choice([9, 60, 1000]))).replace("M", str(random.choice([5, 12, 20, 200])))


def _word(random: Random) -> str:
    return "".join(random.choices('abcdefgh_- "\\\n\u00e9\u4e2d', k=random.randint(1, 12)))


def _wide(random: Random) -> dict[str, Any]:
    """One object of many properties."""
    names = [f"{random.choice('abc')}{at}" for at in range(random.choice([20, 100, 250, 256, 257, 400]))]
    required = [name for name in names if random.random() < random.choice([0.0, 0.1, 0.9])]
    others: Any = random.choice([True, False, {"type": "string"}])
    properties = {name: _simple(random) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": others}


def _wide_ones(random: Random) -> dict[str, Any]:
    """Several objects of many properties, each within the bound: beside each other, or all of them at once."""
    count, width = random.randint(2, 30), random.choice([50, 128, 256])
    small: dict[str, Any] = random.choice([{}, {"type": random.choice(KINDS)}])
    parts: dict[str, Any] = {}
    room = MAX_BYTES
    for at in range(count):
        part = {"type": "object", "properties": {f"{at:x}_{one:x}": small for one in range(width)}}
        room -= len(json.dumps(part)) + 10
        if room < 0:
            break
        parts[f"o{at}"] = part
    joined = random.choice(["properties", "properties", "allOf", "anyOf"])
    if joined != "properties":
        return {joined: [*parts.values()]}
    return {"type": "object", "properties": parts, "required": random.choice([[], [*parts]])}


def _words(random: Random) -> dict[str, Any]:
    count, prefix = random.choice([500, 3_000, 6_000, 9_999, 10_001]), "a" * random.choice([0, 1, 40])
    values: list[Any] = []
    room = MAX_BYTES
    while len(values) < count and room > 0:
        values.append(random.choice([f"{prefix}{len(values):x}", _word(random), len(values)]))
        room -= len(json.dumps(values[-1])) + 2
    return {"enum": values}


def _deep(random: Random) -> dict[str, Any]:
    made: dict[str, Any] = _simple(random)
    for _ in range(random.randint(1, 20)):
        wraps = (
            {"type": "array", "items": made, "minItems": random.randint(0, 3)},
            {"type": "object", "properties": {"a": made, "b": _simple(random)}},
            {"anyOf": [made, _simple(random)]},
            {"allOf": [made, _simple(random)]},
        )
        made = random.choice(wraps)
    return made


def _choices(random: Random) -> dict[str, Any]:
    """Alternatives of alternatives, all of which must hold."""
    word, count = random.choice(["anyOf", "oneOf"]), random.randint(2, 40)
    kind = random.choice(["const", "pattern", "minimum"])
    values: dict[str, Callable[[], Any]] = {
        "const": lambda: random.randint(0, 99),
        "pattern": lambda: f".*{random.choice('abc')}.{{{random.randint(1, 9)}}}",
        "minimum": lambda: random.randint(-9, 9),
    }
    parts = [
        {word: [{"properties": {f"p{at}": {kind: values[kind]()}}} for _ in range(random.randint(2, 6))]}
        for at in range(count)
    ]
    return {"type": "object", "allOf": parts}


def _references(random: Random) -> dict[str, Any]:
    """Definitions that lead to each other at random."""
    names = [f"d{at}" for at in range(random.choice([1, 5, 60, 250]))]

    def one() -> dict[str, Any]:
        refs = [{"$ref": f"#/$defs/{random.choice(names)}"} for _ in range(random.randint(1, 4))]
        shapes = ({"anyOf": refs}, {"allOf": refs}, {"type": "array", "items": refs[0]}, refs[0], _simple(random))
        ring = {"type": "object", "properties": dict(zip("abcd", refs, strict=False)), "required": ["a"]}
        return random.choice([*shapes, ring])

    return {"$defs": {name: one() for name in names}, "$ref": f"#/$defs/{names[0]}"}


def _patterns(random: Random) -> dict[str, Any]:
    """Expressions, some of which must all match at once."""
    made = [{"type": "string", "pattern": _expression(random)} for _ in range(random.randint(1, 5))]
    keys = {one["pattern"]: {"type": "integer"} for one in made}
    shapes = ({"allOf": made}, {"anyOf": made}, made[0], {"type": "object", "patternProperties": keys})
    return {**random.choice(shapes), "maxLength": random.choice([10, 1_000, 10**6])}


def _lengths(random: Random) -> dict[str, Any]:
    low, high = sorted(random.choices([0, 1, 50, 1_000, 10**5, 10**6, 10**9, 2**53], k=2))
    inner = _simple(random)
    return random.choice(
        [
            {"type": "string", "minLength": low, "maxLength": high},
            {"type": "array", "items": inner, "minItems": low, "maxItems": high},
            {"type": "array", "prefixItems": [inner] * min(low, 2_000), "items": inner, "maxItems": high},
            {"type": "object", "additionalProperties": inner, "minProperties": low, "maxProperties": high},
        ]
    )


def _numbers(random: Random) -> dict[str, Any]:
    numbers = [0, 1, -1, 0.1, 1e-9, 1e300, -1e300, 2**53, 10**19, 0.30000000000000004, 123456789.987654321, -0.0]
    words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    given = {word: random.choice(numbers) for word in words if random.random() < 0.6}
    return {"type": random.choice(["integer", "number", ["integer", "null"]]), **given}


def _mutated(random: Random) -> dict[str, Any]:
    """A schema of somebody who means well, with one thing in it that is not as it should be."""
    schema: dict[str, Any] = json.loads(json.dumps(random.choice(FIFTY).schema))
    places: list[tuple[Any, Any]] = []
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        inner = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        places += [(node, key) for key, _ in inner]
        left += [one for _, one in inner if isinstance(one, dict | list)]
    node, key = random.choice(places)
    node[key] = random.choice([*JUNK, _simple(random), _word(random)])
    return schema


def _options(random: Random) -> dict[str, Any]:
    """What the library itself reads in a schema."""
    told = {"whitespace_pattern": _expression(random), "lenient": True, "coerce_one_of": True, "item_separator": "x"}
    chosen = {
        name: random.choice([value, random.choice(JUNK)]) for name, value in told.items() if random.random() < 0.7
    }
    return {"x-guidance": random.choice([chosen, random.choice(JUNK)]), **_simple(random), "type": "object"}


SCHEMAS: Mapping[str, Callable[[Random], dict[str, Any]]] = {
    "wide": _wide,
    "wide ones": _wide_ones,
    "words": _words,
    "deep": _deep,
    "choices": _choices,
    "references": _references,
    "patterns": _patterns,
    "lengths": _lengths,
    "numbers": _numbers,
    "mutated": _mutated,
    "options": _options,
}


def _lark(random: Random) -> str:
    rules = [f"r{at}" for at in range(random.choice([1, 4, 60, 1_000]))]
    tokens = [f"T{at}: /{_expression(random)}/" for at in range(random.randint(1, 4))]
    lines = ["start: r0", *tokens]
    for rule in rules:
        names = [*random.choices(rules, k=2), f"T{random.randrange(len(tokens))}", '"a"', '""']
        ways = [" ".join(random.choices(names, k=random.randint(0, 4))) for _ in range(random.randint(1, 4))]
        lines.append(
            f"{rule}: " + " | ".join(f"({way}){random.choice(['', '*', '+', '?', '{1,900}'])}" for way in ways)
        )
    return "\n".join(lines)[:MAX_BYTES]


def _gbnf(random: Random) -> str:
    rules = [f"r{at}" for at in range(random.choice([1, 4, 60, 400]))]
    lines = ["root ::= r0"]
    for rule in rules:
        names = [*random.choices(rules, k=2), '"a"', "[a-z]", "[^\\n]", '"\\x00"', "."]
        ways = [" ".join(random.choices(names, k=random.randint(1, 4))) for _ in range(random.randint(1, 4))]
        lines.append(f"{rule} ::= " + " | ".join(f"({way}){random.choice(REPEATS)}" for way in ways))
    return "\n".join(lines)[: random.choice([MAX_BYTES, 40])]


def _spelt(random: Random) -> str:
    """A schema as a text, which is read less strictly than a body."""
    digits = "1" + "0" * random.choice([20, 400, 5_000])
    depth = random.choice([60, 900, 20_000])
    texts = (
        f'{{"enum": [{digits}]}}', f'{{"maximum": {digits}}}', '{"const": NaN}', '{"const": -Infinity, "type": 1e999}',
        '{"const": "\\ud800"}', '{"properties": {"\\udfff": {}}}', '{"type": "null", "type": "string"}', "[]", "nu", "",
        '{"items":' * depth + "{}" + "}" * depth, "[" * depth, '{"const": "\\u0000"}', '{"pattern": "\\ud83d"}',
    )  # fmt: skip
    return random.choice(texts)


FIELDS: Mapping[str, Callable[[Random], Any]] = {
    "regex": _expression,
    "guided_regex": lambda random: f"({_expression(random)})|({_expression(random)})" * random.choice([1, 20]),
    "grammar": lambda random: random.choice([_lark, _gbnf])(random),
    "guided_grammar": lambda random: random.choice([_lark, _gbnf])(random),
    "guided_json": _spelt,
    "choice": lambda random: [_word(random) for _ in range(random.choice([1, 100, 3_000, 10_001]))],
}


def hostile_grammar(seed: int) -> HostileGrammar:
    """The one that this seed makes: two of three are schemas."""
    random = Random(seed)
    if random.random() < 2 / 3:
        family = random.choice([*SCHEMAS])
        return HostileGrammar(f"{family}, seed {seed}", _asked(SCHEMAS[family](random)))
    field = random.choice([*FIELDS])
    return HostileGrammar(f"{field}, seed {seed}", _fields(**{field: FIELDS[field](random)}))
