"""Random valid bodies for every route that agents use, with all fields that their clients send. Pure functions."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

CHAT, RESPONSES, MESSAGES, COUNT = ROUTES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
MAX_TOKENS = 4
Body = dict[str, Any]
TEXTS = (
    "hello", "How warm is it in Bonn?", "", " ", "日本語 é \U0001f600", "<tool_call>\n{", "</think>", "<|im_end|>",
    '{"name": "find", "arguments": {}}', "line\nline\ttab", "\u200d\u0000", "a " * 30,
)  # fmt: skip
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "find": PLACE,
    "paint": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
    "list_files": {"type": "object", "properties": {}},
    "mcp__home.run-it:now/1": None,
    "edit": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1, "description": "A path."},
            "lines": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
            "more": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None},
        },
        "required": ["path"],
    },
    "unsure": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"enum": [1]}}}},
}
"""Few tools, because the server compiles a grammar for every different set of them."""
OTHER_TOOLS: tuple[Body, ...] = (
    {"type": "web_search"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "namespace", "name": "agents", "description": "x", "tools": []},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1024},
    {"type": "file_search", "vector_store_ids": ["x"]},
    {"type": "mcp", "server_label": "x", "server_url": "http://192.0.2.1"},
)


def _some(random: Random, **fields: Any) -> Body:
    """A random part of these fields."""
    return {name: value for name, value in fields.items() if random.random() < 0.3}


def _names(random: Random) -> list[str]:
    return random.sample(sorted(SCHEMAS), random.randint(1, 2))


def _text(random: Random) -> str:
    return random.choice(TEXTS)


def _arguments(random: Random) -> Body:
    return random.choice(({}, {"city": "Bonn", "size": 1}, {"path": _text(random), "lines": [1]}, {"x": [{"y": None}]}))


def _call_id(random: Random) -> str:
    return random.choice(("call_", "toolu_")) + str(random.randrange(10**6))


def chat_body(random: Random) -> Body:
    """`/v1/chat/completions`: turns, calls and their results, thoughts sent back, tools of all kinds."""
    messages: list[Body] = []
    if random.random() < 0.5:
        messages.append({"role": random.choice(("system", "developer")), "content": _text(random)})
    for _ in range(random.randint(1, 3)):
        messages.append({"role": "user", "content": random.choice((_text(random), _parts(random, "text")))})
        if random.random() < 0.4:
            messages += _chat_call(random)
        if random.random() < 0.4:
            messages.append({"role": "assistant", "content": _text(random), **_some(random, reasoning_content="hm")})
    last = {"role": "user", "content": "so?"}
    body: dict[str, Any] = {"messages": [*messages, last], "max_tokens": random.randint(1, MAX_TOKENS)}
    if random.random() < 0.7:
        names = _names(random)
        by_name = {"type": "function", "function": {"name": names[0]}}
        choice = random.choice(("auto", "none", "required", by_name))
        tools = [{"type": "function", "function": _function(random, name)} for name in names]
        body |= {"tools": tools, **_some(random, tool_choice=choice, parallel_tool_calls=random.random() < 0.5)}
        body["tools"] += random.sample(OTHER_TOOLS, random.randint(0, 1))
    elif random.random() < 0.3:
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": PLACE, "strict": True}}
        body["response_format"] = random.choice((shape, {"type": "json_object"}, {"type": "text"}))
    if random.random() < 0.3:
        body |= {"stream": True, **_some(random, stream_options={"include_usage": True})}
    return body | _some(
        random,
        temperature=random.choice((0, 0.7, 2)),
        top_p=0.9,
        thinking_token_budget=random.randint(1, 9),
        reasoning_effort="low",
        metadata={"user_id": "x"},
        seed=random.randrange(99),
        stop=["\n\n", "END"],
        user="somebody",
        prompt_cache_key="ses_1",
        n=random.randint(1, 2),
    )


def _parts(random: Random, kind: str) -> list[Body]:
    return [{"type": kind, "text": _text(random)} for _ in range(random.randint(1, 3))]


def _function(random: Random, name: str) -> Body:
    return {"name": name, **_some(random, description=_text(random)), "parameters": SCHEMAS[name]}


def _chat_call(random: Random) -> list[Body]:
    calls = [
        {"id": _call_id(random), "type": "function", "function": {"name": name, "arguments": _args(random)}}
        for name in _names(random)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": _text(random)} for call in calls]
    return [{"role": "assistant", "content": random.choice((None, "", _text(random))), "tool_calls": calls}, *results]


def _args(random: Random) -> str:
    """A call's arguments as text; clients send what a model wrote, which may have been cut."""
    text = json.dumps(_arguments(random))
    return text if random.random() < 0.9 else text[:-1]


def response_body(random: Random) -> Body:
    """`/v1/responses`: a list of items, as Codex and the SDKs send it."""
    items: list[Body] = []
    if random.random() < 0.4:
        items.append({"type": "message", "id": "msg_1", "role": "developer", "content": _parts(random, "input_text")})
    for _ in range(random.randint(1, 3)):
        content = random.choice((_text(random), _parts(random, "input_text")))
        items.append({"role": random.choice(("user", "user", "system")), "content": content})
        if random.random() < 0.4:
            items += _response_call(random)
        if random.random() < 0.4:
            parts = [{"type": "output_text", "text": _text(random), "annotations": []}]
            items.append({"type": "message", "id": "msg_2", "role": "assistant", "content": parts})
    last: Any = [*items, {"role": "user", "content": "so?"}]
    body: dict[str, Any] = {"input": random.choice((last, last, _text(random)))}
    body["max_output_tokens"] = random.randint(1, MAX_TOKENS)
    if random.random() < 0.7:
        names = _names(random)
        choice = random.choice(("auto", "none", "required", {"type": "function", "name": names[0]}))
        tools = [{"type": "function", "strict": False, **_function(random, name)} for name in names]
        body |= {"tools": tools, **_some(random, tool_choice=choice, parallel_tool_calls=random.random() < 0.5)}
        body["tools"] += random.sample(OTHER_TOOLS, random.randint(0, 2))
    elif random.random() < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": PLACE, "strict": True}}
    return body | _some(
        random,
        stream=random.random() < 0.7,
        instructions=_text(random),
        store=random.random() < 0.5,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        client_metadata={"b": 1, "a": 2},
        temperature=random.choice((0, 0.7, 2)),
        metadata={"k": "v"},
        truncation="disabled",
        service_tier="flex",
    )


def _response_call(random: Random) -> list[Body]:
    call_id, thoughts = _call_id(random), [{"type": "reasoning_text", "text": _text(random)}]
    items: list[Body] = []
    if random.random() < 0.4:
        content = random.choice((None, thoughts))
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content, "encrypted_content": None})
    name = random.choice(sorted(SCHEMAS))
    items.append({"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": _args(random)})
    output = random.choice((_text(random), _parts(random, "input_text")))
    return [*items, {"type": "function_call_output", "call_id": call_id, "output": output}]


def count_body(random: Random) -> Body:
    """`/v1/messages/count_tokens`; `/v1/messages` has all of its fields too."""
    messages: list[Body] = []
    for _ in range(random.randint(1, 3)):
        blocks = [{**part, **_some(random, cache_control={"type": "ephemeral"})} for part in _parts(random, "text")]
        messages.append({"role": "user", "content": random.choice((_text(random), blocks))})
        if random.random() < 0.4:
            messages += _message_call(random)
        if random.random() < 0.3:
            messages.append({"role": "system", "content": _text(random)})
        if random.random() < 0.4:
            messages.append({"role": "assistant", "content": random.choice((_text(random), _parts(random, "text")))})
    body: Body = {"messages": [*messages, {"role": "user", "content": "so?"}]}
    if random.random() < 0.5:
        header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.740;"}
        body["system"] = random.choice((_text(random), [header, *_parts(random, "text")]))
    if random.random() < 0.7:
        names = _names(random)
        by_name = {"type": "tool", "name": names[0]}
        choice = random.choice(({"type": "auto"}, {"type": "any"}, {"type": "none"}, by_name))
        tools = [
            {"name": name, **_some(random, description=_text(random)), "input_schema": SCHEMAS[name]} for name in names
        ]
        single = random.random() < 0.5
        body |= {"tools": tools, **_some(random, tool_choice={**choice, "disable_parallel_tool_use": single})}
        body["tools"] += random.sample(OTHER_TOOLS, random.randint(0, 2))
    thinking = random.choice(
        ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": random.randint(1, 9)})
    )
    return body | _some(random, thinking=thinking, output_config={"effort": "high"})


def _message_call(random: Random) -> list[Body]:
    call_id = _call_id(random)
    blocks: list[Body] = [{"type": "text", "text": _text(random)}] if random.random() < 0.5 else []
    if random.random() < 0.4:
        blocks.insert(0, {"type": "thinking", "thinking": _text(random), "signature": ""})
    blocks.append(
        {"type": "tool_use", "id": call_id, "name": random.choice(sorted(SCHEMAS)), "input": _arguments(random)}
    )
    content = random.choice((_text(random), _parts(random, "text"), None))
    result = {"type": "tool_result", "tool_use_id": call_id, "content": content, **_some(random, is_error=True)}
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]


def message_body(random: Random) -> Body:
    """`/v1/messages`."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = count_body(random) | {"max_tokens": random.randint(1, MAX_TOKENS)}
    if "tools" not in body and random.random() < 0.3:
        body["output_config"] = {"format": {"type": "json_schema", "schema": PLACE}}
    return body | _some(
        random,
        stream=random.random() < 0.7,
        metadata={"user_id": '{"device_id": "x"}'},
        temperature=random.choice((0, 0.7, 1)),
        top_k=5,
        stop_sequences=["\n\nHuman:"],
        context_management=edits,
        thread={"type": "create"},
        service_tier="auto",
    )


VALID: dict[str, Callable[[Random], Body]] = {
    CHAT: chat_body,
    RESPONSES: response_body,
    MESSAGES: message_body,
    COUNT: count_body,
}
