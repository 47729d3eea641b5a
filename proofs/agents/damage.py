"""Bodies for every route that agents use, a third of them valid, the others broken: fields changed, or bytes.

What is let in and would be answered at length is bounded: limits that were lost or grew are mostly put back.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from proofs.agents.prompts.bodies import CHAT, MAX_TOKENS, MESSAGES, RESPONSES, VALID, Body
from proofs.api.strangers import RAW, VALUES
from proofs.steps.hostile_schemas import JUNK, UNKNOWN

MAX_PLACES = 500
"""Of a body that is changed once more: lists that are repeated grow quickly."""
LIMITS = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
"""What bounds an answer; a count has none."""
ODD: tuple[Any, ...] = (
    "robot", "System", "tool", "function", "assistant", "user\n", "<|im_start|>system", {"type": "function"},
    {"type": "custom"}, {"type": "tool", "name": None}, {"type": "any"}, {"type": "tool_use", "name": "x", "input": []},
    {"type": "tool_result", "tool_use_id": {}, "content": [{"type": "image", "source": None}]}, {"type": "thinking"},
    {"type": "function", "function": {"name": "x" * 129}}, {"type": "function", "name": "\x00", "parameters": []},
    {"type": "function_call", "call_id": [], "name": "x", "arguments": "{"}, {"type": "item_reference", "id": 1},
    {"type": "enabled", "budget_tokens": 0}, {"type": "enabled", "budget_tokens": 2**53}, {"type": "adaptive"},
    {"type": "create"}, {"type": "continue", "previous_message_id": "msg_x"}, {"type": "continue"}, {"type": []},
    {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}, {"format": {"type": "json_schema"}},
    {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": True}}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}, {"effort": []}, {"effort": "none"},
    {"type": "object", "properties": {"a": {"$ref": "#/definitions/none"}}}, {"type": ["object", "nothing"]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"minimum": 5, "maximum": 1}}}, {"type": "string", "minLength": -1},
    {"type": "object", "properties": []}, {"type": "object", "required": "a"}, {"anyOf": []}, {"const": {"a": [1]}},
    {"type": "array", "items": {}, "minItems": 2**40}, {"type": "object", "additionalProperties": {"$ref": "#"}},
    {"type": "object", "properties": {"a\"}</tool_call>": {"type": "integer"}}}, *JUNK, UNKNOWN,
)  # fmt: skip
"""Beside what any server has to bear: what only these routes could stumble over."""


@dataclass(frozen=True, slots=True)
class GeneratedBody:
    """What is sent."""

    path: str
    data: bytes
    is_valid: bool
    """It must be answered."""


def generated_body(path: str, model: str, random: Random) -> GeneratedBody:
    """A third of them valid, the others broken."""
    body = VALID[path](random) | {"model": model}
    if random.random() < 1 / 3:
        return GeneratedBody(path, _written(body, random), is_valid=True)
    if random.random() < 0.04:
        return GeneratedBody(path, random.choice(RAW), is_valid=False)
    if random.random() < 0.75:
        body = deepcopy(body)  # tools are shared by all
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            _change(body, random)
        if path in LIMITS and random.random() < 0.98:
            _bound(body, LIMITS[path])
        return GeneratedBody(path, _written(body, random), is_valid=False)
    return GeneratedBody(path, random.choice(DAMAGES)(_written(body, random), random), is_valid=False)


def _bound(body: Body, name: str) -> None:
    given = body.get(name)
    if given is None or (isinstance(given, int | float) and given > MAX_TOKENS):
        body[name] = MAX_TOKENS
    if isinstance(body.get("max_completion_tokens"), int | float):
        body.pop("max_completion_tokens")


def _written(body: Body, random: Random) -> bytes:
    return json.dumps(body, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in it."""
    found: list[tuple[Any, Any]] = []
    rest = [value]
    while rest:
        one = rest.pop()
        pairs = list(one.items()) if isinstance(one, dict) else list(enumerate(one)) if isinstance(one, list) else []
        found += [(one, key) for key, _ in pairs]
        rest += [child for _, child in pairs]
    return found


def _change(body: Body, random: Random) -> None:
    """One field of it, however deep."""
    places = _places(body)
    if not 0 < len(places) < MAX_PLACES:
        return
    container, key = random.choice(places)
    match random.randrange(8):
        case 0 | 1:
            container[key] = deepcopy(random.choice(VALUES))
        case 2 | 3:
            container[key] = deepcopy(random.choice(ODD))
        case 4:
            del container[key]
        case 5:
            other, name = random.choice(places)
            container[key] = deepcopy(other[name]) if name in _keys(other) else None
        case 6:
            for _ in range(random.choice((1, 3, 20, 70))):
                container[key] = random.choice(([container[key]], {"a": container[key]}))
        case _:
            container[key] = [deepcopy(container[key]) for _ in range(random.choice((2, 50, 300)))]


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _flipped(data: bytes, random: Random) -> bytes:
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 3, 10))):
        made[random.randrange(len(made))] = random.randrange(256)
    return bytes(made)


def _no_text(data: bytes, random: Random) -> bytes:
    """Bytes that are no UTF-8, or half a surrogate pair, inside a text."""
    wrong = random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\udfff\\ud83d", b"\x00", b"\\u0000"))
    at = data.find(b'": "', random.randrange(len(data)))
    return data[: at + 4] + wrong + data[at + 4 :]


def _twice(data: bytes, random: Random) -> bytes:
    name = random.choice((b"messages", b"input", b"model", b"tools", b"max_tokens", b"stream", b"thread"))
    return data[:-1] + b', "' + name + b'": 1, "' + name + b'": ' + random.choice((b"1}", b"null}", b'"x"}'))


def _strange_numbers(data: bytes, random: Random) -> bytes:
    value = random.choice((b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1" + b"0" * 25, b"1e400", b"0x10", b"1E+308"))
    name = random.choice((b"max_tokens", b"max_output_tokens", b"temperature", b"top_k", b"seed", b"x"))
    return data[:-1] + b', "' + name + b'": ' + value + b"}"


def _deep(data: bytes, random: Random) -> bytes:
    depth = random.choice((30, 63, 64, 65, 500, 5000))
    opened, closed = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = random.choice((b"x", b"metadata", b"tools", b"input", b"messages", b"tool_choice", b"thinking"))
    return data[:-1] + b', "' + name + b'": ' + opened * depth + b"1" + closed * random.choice((depth, 0)) + b"}"


DAMAGES: tuple[Callable[[bytes, Random], bytes], ...] = (_cut, _flipped, _no_text, _twice, _strange_numbers, _deep)
