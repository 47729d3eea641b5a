"""Joins an answer's stream of events, or reads a whole answer, in all three API dialects: one form, to be compared."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Events = Sequence[dict[str, Any]]
Joined = dict[str, Any]
"""An answer as a client has it in the end: its thought, its text, its tool calls and the reason of its end."""


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream's bytes; `[DONE]`, which is no JSON, is left out."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def _join_chat(events: Events) -> Joined:
    joined: Joined = {"thought": "", "text": "", "calls": {}, "end": None}
    for choice in [choice for event in events for choice in event["choices"]]:
        delta = choice["delta"]
        joined["thought"] += delta.get("reasoning_content", "")
        joined["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            parts = joined["calls"].setdefault(call["index"], ["", ""])
            parts[0] += call["function"].get("name", "")
            parts[1] += call["function"]["arguments"]
        joined["end"] = choice["finish_reason"] or joined["end"]
    return {**joined, "calls": [tuple(call) for call in joined["calls"].values()]}


def _read_chat(answer: dict[str, Any]) -> Joined:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return {
        "thought": message.get("reasoning_content", ""),
        "text": message["content"] or "",
        "calls": calls,
        "end": choice["finish_reason"],
    }


def _join_response(events: Events) -> Joined:
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    response = events[-1]["response"]
    joined = _read_response(response)
    expected = [_item_text(item) for item in response["output"]]
    return joined if [texts.get(index, "") for index in range(len(expected))] == expected else {"deltas": texts}


def _read_response(response: dict[str, Any]) -> Joined:
    items = response["output"]
    return {
        "thought": "".join(_item_text(item) for item in items if item["type"] == "reasoning"),
        "text": "".join(_item_text(item) for item in items if item["type"] == "message"),
        "calls": [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"],
        "end": response["status"],
    }


def _item_text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


def _join_message(events: Events) -> Joined:
    blocks: list[dict[str, Any]] = []
    end = None
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "joined": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["joined"] += delta.get("text", delta.get("thinking", delta.get("partial_json")))
        elif event["type"] == "message_delta":
            end = event["delta"]["stop_reason"]
    calls = [(block["name"], parse_arguments(block["joined"])) for block in blocks if block["type"] == "tool_use"]
    return {
        "thought": "".join(block["joined"] for block in blocks if block["type"] == "thinking"),
        "text": "".join(block["joined"] for block in blocks if block["type"] == "text"),
        "calls": calls,
        "end": end,
    }


def _read_message(message: dict[str, Any]) -> Joined:
    blocks = message["content"]
    return {
        "thought": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "calls": [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        "end": message["stop_reason"],
    }


def parse_arguments(arguments: str) -> Any:
    """The parsed arguments of a call; arguments that were cut are no JSON, and read as {}."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def message_of_events(events: Events) -> dict[str, Any]:
    """The message that a client has at the end of a stream, and can send back."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"]}
            case "content_block_start":
                message["content"].append({**event["content_block"]})
                texts.append("")
            case "content_block_delta":
                texts[-1] += next(event["delta"][key] for key in DELTAS if key in event["delta"])
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for block, text in zip(message["content"], texts, strict=True):
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[key] = text if key != "input" else parse_arguments(text)
    return message


DELTAS = ("text", "thinking", "partial_json")
Join = Callable[[Events], Joined]
Whole = Callable[[dict[str, Any]], Joined]
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
JOINS: dict[str, tuple[Join, Whole]] = {
    CHAT: (_join_chat, _read_chat),
    RESPONSES: (_join_response, _read_response),
    MESSAGES: (_join_message, _read_message),
}
"""Dialect name -> the function that joins a stream, the function that reads a whole answer."""
