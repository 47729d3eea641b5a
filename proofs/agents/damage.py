"""Request bodies for every route that agents use: a third are valid, the others have changed fields or damaged bytes.

A changed body may still be valid: a limit of output tokens that was lost or grew is mostly put back.
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

MAX_FIELDS = 500
"""A body with more fields is not changed again: repeated lists grow quickly."""
LIMITS = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
"""The field that bounds an answer's length; the route that counts tokens has none."""
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
"""Odd values that only these routes might mishandle, in addition to `VALUES` for every route."""


@dataclass(frozen=True, slots=True)
class GeneratedBody:
    """A request to send."""

    path: str
    data: bytes
    is_valid: bool
    """The server must answer this request with 200 (or 503, when full)."""


def generated_body(path: str, model: str, random: Random) -> GeneratedBody:
    """A random body: one of three is valid, the others are broken."""
    body = VALID[path](random) | {"model": model}
    if random.random() < 1 / 3:
        return GeneratedBody(path, _encode(body, random), is_valid=True)
    if random.random() < 0.04:
        return GeneratedBody(path, random.choice(RAW), is_valid=False)
    if random.random() < 0.75:
        body = deepcopy(body)  # tools are shared by all
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            _change(body, random)
        if path in LIMITS and random.random() < 0.98:
            _restore_limit(body, LIMITS[path])
        return GeneratedBody(path, _encode(body, random), is_valid=False)
    return GeneratedBody(path, random.choice(DAMAGES)(_encode(body, random), random), is_valid=False)


def _restore_limit(body: Body, name: str) -> None:
    limit = body.get(name)
    if limit is None or (isinstance(limit, int | float) and limit > MAX_TOKENS):
        body[name] = MAX_TOKENS
    if isinstance(body.get("max_completion_tokens"), int | float):
        body.pop("max_completion_tokens")


def _encode(body: Body, random: Random) -> bytes:
    return json.dumps(body, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def _fields(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) pair of a JSON value, at any depth."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        pairs = [*node.items()] if isinstance(node, dict) else [*enumerate(node)] if isinstance(node, list) else []
        places += [(node, key) for key, _ in pairs]
        stack += [child for _, child in pairs]
    return places


def _change(body: Body, random: Random) -> None:
    """Change one random field of a body, at any depth."""
    fields = _fields(body)
    if not 0 < len(fields) < MAX_FIELDS:
        return
    container, key = random.choice(fields)
    match random.randrange(8):
        case 0 | 1:
            container[key] = deepcopy(random.choice(VALUES))
        case 2 | 3:
            container[key] = deepcopy(random.choice(ODD))
        case 4:
            del container[key]
        case 5:
            source, name = random.choice(fields)
            container[key] = deepcopy(source[name]) if name in _keys_of(source) else None
        case 6:
            for _ in range(random.choice((1, 3, 20, 70))):
                container[key] = random.choice(([container[key]], {"a": container[key]}))
        case _:
            container[key] = [deepcopy(container[key]) for _ in range(random.choice((2, 50, 300)))]


def _keys_of(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _flip(data: bytes, random: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 3, 10))):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    return bytes(damaged)


def _break(data: bytes, random: Random) -> bytes:
    """Insert bytes that are no UTF-8, or half a surrogate pair, into a string."""
    insertion = random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\\udfff\\ud83d", b"\x00", b"\\u0000"))
    position = data.find(b'": "', random.randrange(len(data)))
    return data[: position + 4] + insertion + data[position + 4 :]


def _repeat(data: bytes, random: Random) -> bytes:
    name = random.choice((b"messages", b"input", b"model", b"tools", b"max_tokens", b"stream", b"thread"))
    return data[:-1] + b', "' + name + b'": 1, "' + name + b'": ' + random.choice((b"1}", b"null}", b'"x"}'))


def _add_number(data: bytes, random: Random) -> bytes:
    value = random.choice((b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1" + b"0" * 25, b"1e400", b"0x10", b"1E+308"))
    name = random.choice((b"max_tokens", b"max_output_tokens", b"temperature", b"top_k", b"seed", b"x"))
    return data[:-1] + b', "' + name + b'": ' + value + b"}"


def _nest(data: bytes, random: Random) -> bytes:
    depth = random.choice((30, 63, 64, 65, 500, 5000))
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = random.choice((b"x", b"metadata", b"tools", b"input", b"messages", b"tool_choice", b"thinking"))
    return data[:-1] + b', "' + name + b'": ' + opening * depth + b"1" + closing * random.choice((depth, 0)) + b"}"


DAMAGES: tuple[Callable[[bytes, Random], bytes], ...] = (_cut, _flip, _break, _repeat, _add_number, _nest)
