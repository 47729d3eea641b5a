"""Answers in all three dialects as their clients put them together, from events or whole: one form, to be compared."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Events = Sequence[dict[str, Any]]
Joined = dict[str, Any]
"""What a client has in the end: its thought, its text, its calls, its end."""


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Of a stream: what its lines of data say, but for a last word that is no JSON."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def _chat_joined(events: Events) -> Joined:
    told: Joined = {"thought": "", "text": "", "calls": {}, "end": None}
    for choice in [choice for event in events for choice in event["choices"]]:
        delta = choice["delta"]
        told["thought"] += delta.get("reasoning_content", "")
        told["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            own = told["calls"].setdefault(call["index"], ["", ""])
            own[0] += call["function"].get("name", "")
            own[1] += call["function"]["arguments"]
        told["end"] = choice["finish_reason"] or told["end"]
    return {**told, "calls": [tuple(call) for call in told["calls"].values()]}


def _chat_whole(answer: dict[str, Any]) -> Joined:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return {
        "thought": message.get("reasoning_content", ""),
        "text": message["content"] or "",
        "calls": calls,
        "end": choice["finish_reason"],
    }


def _response_joined(events: Events) -> Joined:
    said: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            said[event["output_index"]] = said.get(event["output_index"], "") + event["delta"]
    last = events[-1]["response"]
    told = _response_whole(last)
    shown = [_item_text(item) for item in last["output"]]
    return told if [said.get(at, "") for at in range(len(shown))] == shown else {"deltas": said}


def _response_whole(response: dict[str, Any]) -> Joined:
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


def _message_joined(events: Events) -> Joined:
    blocks: list[dict[str, Any]] = []
    end = None
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["said"] += delta.get("text", delta.get("thinking", delta.get("partial_json")))
        elif event["type"] == "message_delta":
            end = event["delta"]["stop_reason"]
    calls = [(block["name"], read_or_nothing(block["said"])) for block in blocks if block["type"] == "tool_use"]
    return {
        "thought": "".join(block["said"] for block in blocks if block["type"] == "thinking"),
        "text": "".join(block["said"] for block in blocks if block["type"] == "text"),
        "calls": calls,
        "end": end,
    }


def _message_whole(message: dict[str, Any]) -> Joined:
    blocks = message["content"]
    return {
        "thought": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "calls": [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        "end": message["stop_reason"],
    }


def read_or_nothing(arguments: str) -> Any:
    """Arguments that were cut are no JSON, and count for none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def message_of_events(events: Events) -> dict[str, Any]:
    """A message as a client has it at a stream's end, to be sent back."""
    message: dict[str, Any] = {}
    said: list[str] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"]}
            case "content_block_start":
                message["content"].append({**event["content_block"]})
                said.append("")
            case "content_block_delta":
                said[-1] += next(event["delta"][key] for key in DELTAS if key in event["delta"])
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for block, text in zip(message["content"], said, strict=True):
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[key] = text if key != "input" else read_or_nothing(text)
    return message


DELTAS = ("text", "thinking", "partial_json")
Join = Callable[[Events], Joined]
Whole = Callable[[dict[str, Any]], Joined]
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
JOINS: dict[str, tuple[Join, Whole]] = {
    CHAT: (_chat_joined, _chat_whole),
    RESPONSES: (_response_joined, _response_whole),
    MESSAGES: (_message_joined, _message_whole),
}
"""By dialect: how a stream is joined, and how a whole answer is read."""
