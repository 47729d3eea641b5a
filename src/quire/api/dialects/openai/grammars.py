"""The many fields in which clients say what an answer must match, and the one grammar they come to.

response_format        OpenAI's: text, json_object, json_schema
structured_outputs     vLLM's: json, json_object, regex, choice, grammar; and guided_json and so on, as they were called
regex choice grammar   the plain words
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.api.dialects.openai.schemas import SamplingFields
from quire.api.http.errors import invalid
from quire.client.request.params import MAX_JSON_LISTS, Grammar, has_too_many_lists

Make = Callable[[Any, str], Grammar]


def _schema(given: Any, name: str) -> Grammar:
    if isinstance(given, str):
        if has_too_many_lists(given):
            raise invalid(f"{name}: expected at most {MAX_JSON_LISTS:,} lists and objects; leave some out", name)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise invalid(f"{name} must be a JSON schema, the text given is no JSON", name) from None
    return Grammar.json_schema(given, name)


def _rules(given: Any, name: str) -> Grammar:
    return Grammar.gbnf(given, name) if isinstance(given, str) and "::=" in given else Grammar.lark(given, name)


def _object(_given: Any, _name: str) -> Grammar:
    return Grammar.json_object()


MAKERS: Mapping[str, Make] = {
    "json": _schema,
    "json_object": _object,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": _rules,
}
"""By the words of `structured_outputs`; `guided_` stands before them in the older ones."""
PLAIN = ("regex", "choice", "grammar")


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """What the answer must match; None: nothing. Raises for more than one way of saying it."""
    said = [*_formats(fields.response_format), *_words(fields.structured_outputs)]
    said += [(MAKERS[name], f"guided_{name}", getattr(fields, f"guided_{name}")) for name in MAKERS]
    said += [(MAKERS[name], name, getattr(fields, name)) for name in PLAIN]
    # A schema may be false; an object that is not asked for is none.
    given = [one for one in said if one[2] is not None and one != (_object, one[1], False)]
    if len(given) > 1:
        names = " and ".join(name for _, name, _ in given[:3])
        raise invalid(f"an answer must match one grammar, {names} say one each; leave all but one out", given[1][1])
    return given[0][0](given[0][2], given[0][1]) if given else None


def _formats(given: Mapping[str, Any] | None) -> list[tuple[Make, str, Any]]:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return []
    if kind == "json_object":
        return [(_object, "response_format", True)]
    inner = given.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, Mapping) or inner.get("schema") is None:
        message = "response_format must be of type text, json_object, or json_schema with a schema in json_schema"
        raise invalid(f"{message}; {str(kind)[:40]!r} given", "response_format")
    return [(_schema, "response_format", inner["schema"])]


def _words(given: Mapping[str, Any] | None) -> list[tuple[Make, str, Any]]:
    strange = sorted(name for name, value in (given or {}).items() if value and name not in MAKERS)
    if strange:
        raise invalid(f"structured_outputs takes {', '.join(MAKERS)}, {strange[0][:40]!r} given", "structured_outputs")
    return [(MAKERS[name], "structured_outputs", value) for name, value in (given or {}).items() if name in MAKERS]
