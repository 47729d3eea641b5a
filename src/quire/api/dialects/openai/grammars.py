"""The many fields that constrain an answer, and the one grammar they come to.

response_format        OpenAI's: text, json_object, json_schema
structured_outputs     vLLM's: json, json_object, regex, choice, grammar; and guided_json and so on, as they were called
regex choice grammar   the plain names
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.api.dialects.openai.schemas import SamplingFields
from quire.api.http.errors import invalid
from quire.client.request.params import Grammar
from quire.strict_json import MAX_JSON_LISTS, has_too_many_lists

Make = Callable[[Any, str], Grammar]


def _schema(schema: Any, name: str) -> Grammar:
    if isinstance(schema, str):
        if has_too_many_lists(schema):
            raise invalid(f"{name}: expected at most {MAX_JSON_LISTS:,} lists and objects; leave some out", name)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(f"{name}: expected a JSON schema, got text that is not JSON", name) from None
    return Grammar.json_schema(schema, name)


def _rules(text: Any, name: str) -> Grammar:
    return Grammar.gbnf(text, name) if isinstance(text, str) and "::=" in text else Grammar.lark(text, name)


def _object(_value: Any, _name: str) -> Grammar:
    return Grammar.json_object()


MAKERS: Mapping[str, Make] = {
    "json": _schema,
    "json_object": _object,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": _rules,
}
"""By the names in `structured_outputs`; the older ones have the prefix `guided_`."""
PLAIN = ("regex", "choice", "grammar")


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """What the answer must match; None: nothing. Raises if there is more than one."""
    candidates = [*_formats(fields.response_format), *_structured(fields.structured_outputs)]
    candidates += [(MAKERS[name], f"guided_{name}", getattr(fields, f"guided_{name}")) for name in MAKERS]
    candidates += [(MAKERS[name], name, getattr(fields, name)) for name in PLAIN]
    # A schema may be false; json_object: false is no grammar.
    found = [one for one in candidates if one[2] is not None and one != (_object, one[1], False)]
    if len(found) > 1:
        names = " and ".join(name for _, name, _ in found[:3])
        raise invalid(f"expected one grammar for a response, got {names}; leave all but one out", found[1][1])
    return found[0][0](found[0][2], found[0][1]) if found else None


def _formats(response_format: Mapping[str, Any] | None) -> list[tuple[Make, str, Any]]:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return []
    if kind == "json_object":
        return [(_object, "response_format", True)]
    inner = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, Mapping) or inner.get("schema") is None:
        message = "expected response_format of type text, json_object, or json_schema with a schema in json_schema"
        raise invalid(f"{message}, got {str(kind)[:40]!r}", "response_format")
    return [(_schema, "response_format", inner["schema"])]


def _structured(outputs: Mapping[str, Any] | None) -> list[tuple[Make, str, Any]]:
    strange = sorted(name for name, value in (outputs or {}).items() if value and name not in MAKERS)
    if strange:
        raise invalid(f"expected one of {', '.join(MAKERS)}, got {strange[0][:40]!r}", "structured_outputs")
    return [(MAKERS[name], "structured_outputs", value) for name, value in (outputs or {}).items() if name in MAKERS]
