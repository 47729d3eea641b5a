"""Fifty JSON schemas for answers of a small model: ten as applications use them, each with a matching document, and
forty that cover the keywords of JSON schema.

Strings and lists without a bound on their length get one: a small model goes on for ever where a grammar allows it, and
an answer that was cut proves nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LENGTH, MAX_ITEMS = 24, 2
SHORT_FORMATS = frozenset({"date", "uuid", "ipv4", "ipv6"})
"""Formats of a bounded length."""
LONG_FORMATS = {"date-time": 32}
"""Format -> a larger bound, for formats whose shortest texts are about `MAX_LENGTH` long."""

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
YES_NO: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
EMAIL: Schema = {"type": "string", "format": "email"}
DATE: Schema = {"type": "string", "format": "date"}


@dataclass(frozen=True, slots=True)
class SchemaTask:
    """A schema, and the wish (`wish`) that a prompt puts into words."""

    name: str
    wish: str
    schema: Schema
    document: Any = None
    """A document that matches the schema; only the ten have one."""


def bounded_schema(part: Any) -> Any:
    """A copy of the schema in which every string and list has a bound."""
    if isinstance(part, list):
        return [bounded_schema(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    literals = ("enum", "const", "required")
    bounded = {name: value if name in literals else bounded_schema(value) for name, value in part.items()}
    kinds, fmt = part.get("type"), part.get("format")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not {"maxLength", "pattern", "enum", "const"} & part.keys() and fmt not in SHORT_FORMATS:
        bounded["maxLength"] = LONG_FORMATS.get(str(fmt), MAX_LENGTH)
    if "array" in kinds and not {"maxItems", "prefixItems"} & part.keys():
        bounded["maxItems"] = max(MAX_ITEMS, part.get("minItems", 0))
    return bounded


def _object(**properties: Schema) -> dict[str, Any]:
    """An object with all of these properties, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _list(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _enum(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*words]}


def _between(low: float, high: float, kind: str = "integer", **more: Any) -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": high, **more}


def _pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


NODE = _object(value=_between(0, 99), children=_list({"$ref": "#/$defs/node"}))
PLACE = _object(city=TEXT, country=_enum("France", "Japan", "Peru", "Kenya"))

TEN = (
    SchemaTask(
        "person",
        "a person with name, age and e-mail",
        _object(name=TEXT, age=_between(0, 150), email=EMAIL, is_member=YES_NO),
        {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "is_member": True},
    ),
    SchemaTask(
        "weather_tool",
        "a call of the weather service",
        _object(
            name={"const": "get_weather"},
            arguments=_object(location=TEXT, unit=_enum("celsius", "fahrenheit"), days=_between(1, 7)),
        ),
        {"name": "get_weather", "arguments": {"location": "Paris, France", "unit": "celsius", "days": 3}},
    ),
    SchemaTask(
        "extraction",
        "the people and places that are named",
        _object(
            people=_list(_object(name=TEXT, role=_enum("author", "reader", "editor"))),
            places=_list(TEXT),
            language=_enum("en", "de", "fr", "es"),
        ),
        {
            "people": [{"name": "Jorge Borges", "role": "author"}, {"name": "Ana", "role": "reader"}],
            "places": ["Buenos Aires", "Geneva"],
            "language": "es",
        },
    ),
    SchemaTask(
        "recursive_tree",
        "a tree of numbers",
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"value": 1, "children": [{"value": 20, "children": []}, {"value": 3, "children": []}]},
    ),
    SchemaTask(
        "sentiment",
        "how a review of it sounds, and why",
        _object(
            label=_enum("positive", "neutral", "negative"),
            score=_between(0, 1, "number"),
            reason={"type": "string", "maxLength": 200},
        ),
        {"label": "positive", "score": 0.9, "reason": "The reviewer liked the food and would come again with friends."},
    ),
    SchemaTask(
        "search_query",
        "a search for news",
        _object(query={"type": "string", "maxLength": 120}, since=DATE, until=DATE, limit=_between(1, 50)),
        {"query": "river floods in the north", "since": "2024-01-15", "until": "2024-02-29", "limit": 20},
    ),
    SchemaTask(
        "invoice",
        "an invoice",
        _object(
            number=_pattern("^INV-[0-9]{6}$"),
            issued=DATE,
            lines=_list(_object(item=TEXT, quantity=_between(1, 99), price=_between(0, 9999)), minItems=1),
            paid=YES_NO,
        ),
        {
            "number": "INV-004211",
            "issued": "2025-03-31",
            "lines": [{"item": "paper", "quantity": 4, "price": 12}, {"item": "ink", "quantity": 1, "price": 49}],
            "paid": False,
        },
    ),
    SchemaTask(
        "calendar_event",
        "an event with guests",
        _object(
            title=TEXT,
            start={"type": "string", "format": "date-time"},
            minutes=_between(5, 480),
            guests=_list(EMAIL),
            room={"type": ["string", "null"]},
        ),
        {
            "title": "Planning",
            "start": "2025-06-01T09:30:00Z",
            "minutes": 45,
            "guests": ["bo@example.com"],
            "room": None,
        },
    ),
    SchemaTask(
        "classification",
        "what kind of message it is",
        _object(
            category=_enum("billing", "delivery", "returns", "account", "technical", "praise", "spam", "other"),
            tags=_list(_enum("urgent", "refund", "angry", "question", "follow-up")),
            confidence=_between(0, 100),
            needs_review=YES_NO,
        ),
        {"category": "delivery", "tags": ["urgent", "question"], "confidence": 87, "needs_review": False},
    ),
    SchemaTask(
        "product",
        "a product of a shop",
        _object(
            sku=_pattern("^[A-Z]{3}-[0-9]{4}$"),
            name=TEXT,
            price=_object(amount=_between(0, 100_000), currency=_enum("EUR", "USD", "JPY")),
            stock=WHOLE,
            colours=_list(_enum("red", "green", "blue", "black")),
        ),
        {
            "sku": "LMP-0042",
            "name": "desk lamp",
            "price": {"amount": 3990, "currency": "EUR"},
            "stock": 12,
            "colours": ["red", "black"],
        },
    ),
)
"""Schemas as applications use them."""

KEYWORDS: Mapping[str, tuple[str, Schema]] = {
    "flag": ("whether it is true", YES_NO),
    "constant": ("a fixed answer", {"const": {"answer": [1, 2, None]}}),
    "mixed_enum": ("one of several values", {"enum": ["small", 7, None, True, {"size": [1]}]}),
    "count": ("a number of things", _between(-20, 20)),
    "whole_number": ("a whole number", _object(number=WHOLE)),
    "above_below": (
        "a share",
        _object(share={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    ),
    "fives": ("a number in steps of five", _object(number=_between(0, 500, multipleOf=5))),
    "quarters": ("a size in steps of a quarter", _object(size=_between(0, 10, "number", multipleOf=0.25))),
    "degrees": ("a temperature", _object(low=_between(-40.5, 0, "number"), high=_between(0, 55.5, "number"))),
    "short_text": ("a word", {"type": "string", "minLength": 2, "maxLength": 12}),
    "exact_text": ("a code of six signs", _object(code={"type": "string", "minLength": 6, "maxLength": 6})),
    "letters": ("a word in small letters", {"type": "string", "pattern": "^[a-z]{3,10}$"}),
    "plate": ("a number plate", _object(plate=_pattern("^[A-Z]{2} [0-9]{3} [A-Z]{2}$"))),
    "phone": ("a phone number", _object(phone=_pattern(r"^\+[0-9]{1,3} [0-9]{4,9}$"))),
    "version": ("a version", _object(version=_pattern(r"^(0|[1-9][0-9]?)\.[0-9]{1,2}(\.[0-9]{1,2})?(-rc[0-9])?$"))),
    "moment": ("a moment", _object(at={"type": "string", "format": "time"})),
    "span": ("how long it takes", _object(takes={"type": "string", "format": "duration"})),
    "address": ("an address in a network", _object(v4={"type": "string", "format": "ipv4"}, port=_between(1, 65535))),
    "long_address": ("an address in a network", _object(v6={"type": "string", "format": "ipv6"})),
    "identifier": ("an identifier", _object(id={"type": "string", "format": "uuid"})),
    "link": ("a link", _object(link={"type": "string", "format": "uri"})),
    "host": ("a host", _object(host={"type": "string", "format": "hostname"})),
    "words": ("some words", _list(TEXT, minItems=1)),
    "grid": ("a grid of numbers", _list(_list(_between(0, 9), minItems=2, maxItems=2), minItems=2, maxItems=2)),
    "three_answers": ("three answers", _list(YES_NO, minItems=3, maxItems=3)),
    "pair": (
        "a name and a number",
        {"type": "array", "prefixItems": [TEXT, _between(0, 999)], "items": False, "minItems": 2},
    ),
    "tail": (
        "a word and some numbers",
        {"type": "array", "prefixItems": [_enum("sum", "mean")], "items": _between(0, 99), "maxItems": 4},
    ),
    "optional": (
        "what is known of it",
        {
            "type": "object",
            "properties": {"name": TEXT, "height": _between(1, 300), "tall": YES_NO},
            "required": ["name"],
            "additionalProperties": False,
        },
    ),
    "all_optional": (
        "what is known of it",
        {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "c": NOTHING}, "additionalProperties": False},
    ),
    "open": (
        "a few numbers by name",
        {"type": "object", "additionalProperties": _between(0, 9), "minProperties": 1, "maxProperties": 2},
    ),
    "headers": (
        "headers of a message",
        {
            "type": "object",
            "patternProperties": {"^x-[a-z]{1,8}$": {"type": "string", "maxLength": 12}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
    ),
    "either": ("a number or a word", {"anyOf": [_between(0, 1000), {"type": "string", "maxLength": 10}]}),
    "shape": (
        "a shape",
        {
            "oneOf": [
                _object(kind={"const": "circle"}, radius=_between(1, 99)),
                _object(kind={"const": "box"}, width=_between(1, 99), height=_between(1, 99)),
            ]
        },
    ),
    "both": (
        "a named place",
        {
            "allOf": [
                {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
                {"properties": {"place": PLACE}, "required": ["place"]},
            ],
        },
    ),
    "named_twice": (
        "where it comes from and where it goes",
        {"$defs": {"place": PLACE}, **_object(origin={"$ref": "#/$defs/place"}, goal={"$ref": "#/$defs/place"})},
    ),
    "chain": (
        "a list of links",
        {
            "$defs": {"link": {"anyOf": [NOTHING, _object(head=_between(0, 9), rest={"$ref": "#/$defs/link"})]}},
            "$ref": "#/$defs/link",
        },
    ),
    "nested": ("where it is kept", _object(shelf=_object(box=_object(slot=_object(number=_between(1, 40)))))),
    "strange_names": (
        "what it is",
        {
            "type": "object",
            "properties": {"größe (cm)": _between(1, 300), 'the "name"': TEXT, "a\\b": YES_NO, "": NOTHING},
            "required": ["größe (cm)", 'the "name"', "a\\b", ""],
            "additionalProperties": False,
        },
    ),
    "told": (
        "a rating",
        {
            "title": "Rating",
            "description": "How good it is.",
            **_object(stars=_between(1, 5, default=3, examples=[4]), text={**TEXT, "description": "Why."}),
        },
    ),
    "anything_small": ("any object", {"type": "object", "properties": {"ok": YES_NO}, "required": ["ok"]}),
}
"""Name -> the wish, and a schema that covers some keywords."""

FIFTY = (*TEN, *(SchemaTask(name, wish, schema) for name, (wish, schema) in KEYWORDS.items()))
