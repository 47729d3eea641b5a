"""Hostile grammars, which cost much work for few bytes: a table of known ones, and random ones by seed.

Each is a set of fields of a request's body, without the prompt. Each family of random ones is costly in another way:
width, depth, choices, references, patterns, numbers, invalid schemas, and the other notations of grammars.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from proofs.steps.schemas import FIFTY

MAX_BYTES = 60_000
"""The size of grammars that should be accepted: a little less than the server's limit."""
REPEATS = ("", "*", "+", "?", "{1,900}")
KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
PIECES = (
    "(a?){N}a{N}", "((a|aa)+)+", ".*a.{M}", "(.{1,N}x){1,N}", "[^a]{N}", "(ab|a|b)*c{M}", "(x+x+)+y", "(a|b|ab)*N",
    ".{0,N}", r"(\d+|\w+)*z", r"[\p{L}\p{N}]{M}", "((((a*)*)*)*)*", "(a{0,M}){0,M}", "(foo|foobar|foob)*.{M}r",
)  # fmt: skip
"""Pieces of regular expressions; N and M are replaced by numbers."""
UNKNOWN = {
    "if": {"type": "string"}, "not": {"type": "string"}, "uniqueItems": True, "contains": {"type": "integer"},
    "dependentSchemas": {"a": {}}, "propertyNames": {"pattern": "^a"}, "unevaluatedProperties": False,
    "dependentRequired": {"a": ["b"]}, "contentMediaType": "text/html", "$dynamicRef": "#x",
}  # fmt: skip
JUNK: tuple[Any, ...] = (None, True, -1, 0, 2**53, 1e300, 1.5e-300, "", "(", "\u0000", "\U0001f600", [], {}, [[]], [{}])


@dataclass(frozen=True, slots=True)
class HostileGrammar:
    """A hostile grammar, as fields of a request's body."""

    name: str
    """Its description, with the seed that makes it again."""
    fields: str
    """Members of a JSON object, as text, because a JSON library cannot write some of them."""

    def body(self, **fields: Any) -> bytes:
        """The body of a request with this grammar."""
        return f"{json.dumps(fields)[:-1]}, {self.fields}}}".encode()


def _json_members(**fields: Any) -> str:
    return json.dumps(fields)[1:-1]


def _schema_fields(schema: Any) -> str:
    return _json_members(response_format={"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}})


# -- the table ---------------------------------------------------------------------------------------------------------


def _optional(count: int, *, are_required: bool = False) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": names if are_required else []}


def _nested(depth: int, kind: str = "object") -> str:
    """A nested schema as text: JSON libraries cannot write this depth."""
    opening = '{"type": "object", "properties": {"a": ' if kind == "object" else '{"type": "array", "items": '
    closing = "}}" if kind == "object" else "}"
    schema = opening * depth + '{"type": "null"}' + closing * depth
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "deep", "schema": {schema}}}}}'


def _table() -> Iterator[tuple[str, str]]:
    for count in (1_000, 7_000, 10_000, 100_000):
        yield f"enum of {count} words", _schema_fields({"enum": [f"w{number:x}" for number in range(count)]})
    for count in (100, 256, 300, 1_000, 2_000, 5_000):
        yield f"{count} optional properties", _schema_fields(_optional(count))
        yield f"{count} required properties", _schema_fields(_optional(count, are_required=True))
    for depth in (15, 29, 50, 100, 200, 5_000):
        yield f"{depth} objects in each other", _nested(depth)
        yield f"{depth} arrays in each other", _nested(depth, "array")
    patterns = ("(a?){60}a{60}", "((a|aa)+)+", ".*a.{20}", "(.{1,1000}x){1,1000}", ".*x.{12}.*x.{12}.*x.{12}")
    for pattern in (*patterns, "(?=a)b", "(?<!a)b", "(a"):
        yield f"the pattern {pattern}", _schema_fields({"type": "string", "pattern": pattern})
        yield f"the expression {pattern}", _json_members(regex=pattern)
    yield "maxLength 100,000", _schema_fields({"type": "string", "maxLength": 100_000})
    yield "maxItems 10^6", _schema_fields({"type": "array", "items": {}, "minItems": 1_000, "maxItems": 10**6})
    levels = {f"l{number}": {"anyOf": [{"$ref": f"#/$defs/l{number + 1}"}] * 2} for number in range(20)}
    yield "20 levels of anyOf", _schema_fields({"$defs": {**levels, "l20": {"type": "null"}}, "$ref": "#/$defs/l0"})
    choices = [{"anyOf": [{"properties": {f"p{i}": {"const": value}}} for value in (0, 1)]} for i in range(14)]
    yield "2^14 by allOf", _schema_fields({"type": "object", "allOf": choices})
    yield "a reference to itself", _schema_fields({"$ref": "#"})
    yield "a reference to elsewhere", _schema_fields({"$ref": "https://example.com/schema.json"})
    yield "a reference to nothing", _schema_fields({"$ref": "#/$defs/none"})
    for name, value in UNKNOWN.items():
        yield f"the keyword {name}", _schema_fields({"type": "object", name: value})
    yield "minimum above maximum", _schema_fields({"type": "integer", "minimum": 2, "maximum": 1})
    yield "oneOf that overlaps", _schema_fields({"oneOf": [{"type": "integer"}, {"type": "number"}]})


TABLE = tuple(HostileGrammar(name, fields) for name, fields in _table())


# -- by seed -----------------------------------------------------------------------------------------------------------


def _simple(random: Random) -> dict[str, Any]:
    kind = random.choice(KINDS)
    return random.choice([{}, {"type": kind}, {"const": random.randint(0, 9)}, {"enum": ["a", "ab", None]}])


def _expression(random: Random) -> str:
    expression = "".join(random.choice(PIECES) for _ in range(random.randint(1, 5)))
    return expression.replace("N", str(random.choice([9, 60, 1000]))).replace("M", str(random.choice([5, 12, 20, 200])))


def _word(random: Random) -> str:
    return "".join(random.choices('abcdefgh_- "\\\n\u00e9\u4e2d', k=random.randint(1, 12)))


def _wide(random: Random) -> dict[str, Any]:
    """One object with many properties."""
    names = [f"{random.choice('abc')}{number}" for number in range(random.choice([20, 100, 250, 256, 257, 400]))]
    required = [name for name in names if random.random() < random.choice([0.0, 0.1, 0.9])]
    additional: Any = random.choice([True, False, {"type": "string"}])
    properties = {name: _simple(random) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": additional}


def _wide_objects(random: Random) -> dict[str, Any]:
    """Several objects with many properties, each within the limit, as properties or alternatives of one schema."""
    count, width = random.randint(2, 30), random.choice([50, 128, 256])
    small: dict[str, Any] = random.choice([{}, {"type": random.choice(KINDS)}])
    parts: dict[str, Any] = {}
    bytes_left = MAX_BYTES
    for number in range(count):
        part = {"type": "object", "properties": {f"{number:x}_{index:x}": small for index in range(width)}}
        bytes_left -= len(json.dumps(part)) + 10
        if bytes_left < 0:
            break
        parts[f"o{number}"] = part
    keyword = random.choice(["properties", "properties", "allOf", "anyOf"])
    if keyword != "properties":
        return {keyword: [*parts.values()]}
    return {"type": "object", "properties": parts, "required": random.choice([[], [*parts]])}


def _words(random: Random) -> dict[str, Any]:
    count, prefix = random.choice([500, 3_000, 6_000, 9_999, 10_001]), "a" * random.choice([0, 1, 40])
    values: list[Any] = []
    bytes_left = MAX_BYTES
    while len(values) < count and bytes_left > 0:
        values.append(random.choice([f"{prefix}{len(values):x}", _word(random), len(values)]))
        bytes_left -= len(json.dumps(values[-1])) + 2
    return {"enum": values}


def _deep(random: Random) -> dict[str, Any]:
    schema: dict[str, Any] = _simple(random)
    for _ in range(random.randint(1, 20)):
        wraps = (
            {"type": "array", "items": schema, "minItems": random.randint(0, 3)},
            {"type": "object", "properties": {"a": schema, "b": _simple(random)}},
            {"anyOf": [schema, _simple(random)]},
            {"allOf": [schema, _simple(random)]},
        )
        schema = random.choice(wraps)
    return schema


def _choices(random: Random) -> dict[str, Any]:
    """Many sets of alternatives, which must all hold."""
    word, count = random.choice(["anyOf", "oneOf"]), random.randint(2, 40)
    kind = random.choice(["const", "pattern", "minimum"])
    values: dict[str, Callable[[], Any]] = {
        "const": lambda: random.randint(0, 99),
        "pattern": lambda: f".*{random.choice('abc')}.{{{random.randint(1, 9)}}}",
        "minimum": lambda: random.randint(-9, 9),
    }
    parts = [
        {word: [{"properties": {f"p{number}": {kind: values[kind]()}}} for _ in range(random.randint(2, 6))]}
        for number in range(count)
    ]
    return {"type": "object", "allOf": parts}


def _references(random: Random) -> dict[str, Any]:
    """Definitions that reference each other at random."""
    names = [f"d{number}" for number in range(random.choice([1, 5, 60, 250]))]

    def definition() -> dict[str, Any]:
        refs = [{"$ref": f"#/$defs/{random.choice(names)}"} for _ in range(random.randint(1, 4))]
        shapes = ({"anyOf": refs}, {"allOf": refs}, {"type": "array", "items": refs[0]}, refs[0], _simple(random))
        cycle = {"type": "object", "properties": dict(zip("abcd", refs, strict=False)), "required": ["a"]}
        return random.choice([*shapes, cycle])

    return {"$defs": {name: definition() for name in names}, "$ref": f"#/$defs/{names[0]}"}


def _patterns(random: Random) -> dict[str, Any]:
    """Regular expressions, some of which must match at the same time."""
    schemas = [{"type": "string", "pattern": _expression(random)} for _ in range(random.randint(1, 5))]
    keys = {schema["pattern"]: {"type": "integer"} for schema in schemas}
    shapes = ({"allOf": schemas}, {"anyOf": schemas}, schemas[0], {"type": "object", "patternProperties": keys})
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
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    bounds = {keyword: random.choice(numbers) for keyword in keywords if random.random() < 0.6}
    return {"type": random.choice(["integer", "number", ["integer", "null"]]), **bounds}


def _mutated(random: Random) -> dict[str, Any]:
    """A harmless schema with one wrong value."""
    schema: dict[str, Any] = json.loads(json.dumps(random.choice(FIFTY).schema))
    positions: list[tuple[Any, Any]] = []
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        positions += [(node, key) for key, _ in items]
        stack += [value for _, value in items if isinstance(value, dict | list)]
    node, key = random.choice(positions)
    node[key] = random.choice([*JUNK, _simple(random), _word(random)])
    return schema


def _options(random: Random) -> dict[str, Any]:
    """Options of the grammar library, which it reads from a schema."""
    options = {"whitespace_pattern": _expression(random), "lenient": True, "coerce_one_of": True, "item_separator": "x"}
    selection = {
        name: random.choice([value, random.choice(JUNK)]) for name, value in options.items() if random.random() < 0.7
    }
    return {"x-guidance": random.choice([selection, random.choice(JUNK)]), **_simple(random), "type": "object"}


SCHEMAS: Mapping[str, Callable[[Random], dict[str, Any]]] = {
    "wide": _wide,
    "wide ones": _wide_objects,
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
    rules = [f"r{number}" for number in range(random.choice([1, 4, 60, 1_000]))]
    tokens = [f"T{number}: /{_expression(random)}/" for number in range(random.randint(1, 4))]
    lines = ["start: r0", *tokens]
    for rule in rules:
        names = [*random.choices(rules, k=2), f"T{random.randrange(len(tokens))}", '"a"', '""']
        choices = [" ".join(random.choices(names, k=random.randint(0, 4))) for _ in range(random.randint(1, 4))]
        lines.append(
            f"{rule}: " + " | ".join(f"({words}){random.choice(['', '*', '+', '?', '{1,900}'])}" for words in choices)
        )
    return "\n".join(lines)[:MAX_BYTES]


def _gbnf(random: Random) -> str:
    rules = [f"r{number}" for number in range(random.choice([1, 4, 60, 400]))]
    lines = ["root ::= r0"]
    for rule in rules:
        names = [*random.choices(rules, k=2), '"a"', "[a-z]", "[^\\n]", '"\\x00"', "."]
        choices = [" ".join(random.choices(names, k=random.randint(1, 4))) for _ in range(random.randint(1, 4))]
        lines.append(f"{rule} ::= " + " | ".join(f"({words}){random.choice(REPEATS)}" for words in choices))
    return "\n".join(lines)[: random.choice([MAX_BYTES, 40])]


def _schema_text(random: Random) -> str:
    """A schema as text, which the server parses less strictly than a body."""
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
    "guided_json": _schema_text,
    "choice": lambda random: [_word(random) for _ in range(random.choice([1, 100, 3_000, 10_001]))],
}


def hostile_grammar(seed: int) -> HostileGrammar:
    """The hostile grammar of this seed; two of three are JSON schemas."""
    random = Random(seed)
    if random.random() < 2 / 3:
        family = random.choice([*SCHEMAS])
        return HostileGrammar(f"{family}, seed {seed}", _schema_fields(SCHEMAS[family](random)))
    field = random.choice([*FIELDS])
    return HostileGrammar(f"{field}, seed {seed}", _json_members(**{field: FIELDS[field](random)}))
