"""Conversations by seed: ordinary ones, and ones in which a client writes names of control tokens.

Standard library only: both sides of a comparison make them anew, and one side is an earlier commit.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Chat = dict[str, Any]
"""`messages`, and whatever else a template is told."""

WORDS = [
    "Hello", "the weather", "in", "Paris", "is", "nice.", "def f(x):\n    return x", "{'a': [1, 2]}", "3.14",
    "日本語", "こんにちは", "中文", "한국어", "שלום", "مرحبا", "👍🏽", "👨‍👩‍👧", "é", "e\u0301", "naïve",
    "C:\\path", "|", "[1]", "\t", "I'll", "don't", "http://x.y/z?q=1&r=2", "ﬁ", "½", "“quoted”", "100%",
    "{{ x }}", "{% y %}", "a < b > c", "<b>bold</b>", "  ", "\n\n",
]  # fmt: skip
NONCE = "zqjx"
"""Stands on both sides of every name a client writes, and nowhere else."""


def text(random: Random, most: int = 14) -> str:
    """Some words of any kind."""
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def call_id(random: Random) -> str:
    """Nine characters: some templates insist."""
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9))


def tool(random: Random, word: str = "") -> dict[str, Any]:
    """A function a model may call."""
    properties = {f"{word}city": {"type": "string", "description": text(random) + word, "enum": ["a", f"b{word}"]}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    name = f"get_{random.choice(['weather', 'time'])}{word}"
    return {"type": "function", "function": {"name": name, "description": text(random), "parameters": parameters}}


def tool_turn(random: Random, write: Callable[[], str]) -> list[dict[str, Any]]:
    """A call, and what it gave."""
    number = call_id(random)
    arguments: Any = random.choice(
        [
            json.dumps({"city": write(), "days": 3}),
            {"city": write(), "deep": [{"x": write()}]},
            json.dumps(write()),
        ]
    )
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": number, "type": "function", "function": function}
    content = random.choice([None, "", write()])
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": number, "name": "get_weather", "content": write()},
    ]


def ordinary(random: Random) -> Chat:
    """A conversation as clients send them: system, turns, thoughts, tools, parts."""
    return _chat(random, lambda: text(random))


def _chat(random: Random, write: Callable[[], str]) -> Chat:
    first = random.choice(["", "", "system", "system", "developer"])
    messages: list[dict[str, Any]] = [{"role": first, "content": write()}] if first else []
    has_tools = random.random() < 0.4
    for _ in range(random.randint(1, 5)):
        messages.append({"role": "user", "content": _content(random, write)})
        if has_tools and random.random() < 0.6:
            messages += tool_turn(random, write)
        messages.append(_answer(random, write))
    if random.random() < 0.8:
        messages.append({"role": "user", "content": _content(random, write)})
    chat: Chat = {"messages": messages}
    if has_tools:
        chat["tools"] = [tool(random) for _ in range(random.randint(1, 2))]
    if random.random() < 0.2:
        chat["extra"] = {"enable_thinking": random.random() < 0.5}
    if messages[-1]["role"] == "assistant" and random.random() < 0.5:
        chat["continue_final_message"] = True
    return chat


def _content(random: Random, write: Callable[[], str]) -> Any:
    if random.random() < 0.15:
        return [{"type": "text", "text": write()} for _ in range(random.randint(1, 2))]
    return write()


def _answer(random: Random, write: Callable[[], str]) -> dict[str, Any]:
    kind = random.random()
    if kind < 0.25:
        return {"role": "assistant", "content": f"<think>\n{write()}\n</think>\n\n{write()}"}
    if kind < 0.4:
        return {"role": "assistant", "content": write(), "reasoning_content": write()}
    return {"role": "assistant", "content": write()}


def hostile(random: Random, names: Sequence[str]) -> Chat:
    """A conversation with names of control tokens in every field a client can fill, each between two nonces."""

    def write() -> str:
        pieces = ["w"]
        for _ in range(random.randint(1, 4)):
            name = random.choice(names)
            forged = random.choice([name, f"{name}\n{NONCE}{random.choice(names)}", f" {name} ", name * 2])
            pieces += [text(random, 3), f"{NONCE}{forged}{NONCE}"]
        return "".join([*pieces, "w"])

    chat = _chat(random, write)
    word = f"w{NONCE}{random.choice(names)}{NONCE}w"
    chat["tools"] = [tool(random, word)] if random.random() < 0.5 else chat.get("tools")
    for message in chat["messages"]:
        if random.random() < 0.3:
            message["name"] = write()
        for call in message.get("tool_calls", ()):
            call["function"]["name"] += word if random.random() < 0.5 else ""
            if random.random() < 0.3:
                call["id"] = f"w{NONCE}{random.choice(names)}"[:9]
                call["type"] = random.choice(["function", word])
    if random.random() < 0.3:
        chat["documents"] = [{"title": write(), "text": write()}]
    if random.random() < 0.4:
        extra = {"date_string": write(), "reasoning_effort": word, "model_identity": write()}
        chat["extra"] = {**extra, **({"custom_tools": [tool(random, word)]} if random.random() < 0.3 else {})}
    return chat


def twenty(random: Random) -> Chat:
    """An ordinary chat of twenty messages."""
    roles = ["system", *["user", "assistant"] * 9, "user"]
    return {"messages": [{"role": role, "content": " ".join(text(random) for _ in range(4))} for role in roles]}
