"""Formats in which models write calls, and answers in them made from what they mean."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.parsers.tool_format import CALL_ID, HERMES, ID_CHARS, TaggedArguments, ToolFormat

TAGGED = ToolFormat(
    "<tool_call>\n<function=",
    ">",
    "\n</function>\n</tool_call>",
    "\n<tool_call>\n<function=",
    "",
    TaggedArguments("\n<parameter=", ">\n", ">\n", "\n</parameter>"),
)
FORMATS = {
    "hermes": HERMES,
    "tagged": TAGGED,
    "attributes": ToolFormat(
        '<calls>\n<invoke name="',
        '">',
        "\n</invoke>\n",
        '<invoke name="',
        "</calls>",
        TaggedArguments('\n<argument name="', '" kind="text">', '" kind="json">', "</argument>"),
    ),
    "list": ToolFormat('[TOOL_CALLS][{"name": "', '", "arguments": ', f', "id": "{CALL_ID}"}}', ', {"name": "', "]"),
    "ids": ToolFormat("[TOOL_CALLS]", f"[CALL_ID]{CALL_ID}[ARGS]", "", "[TOOL_CALLS]", ""),
    "bare": ToolFormat('{"name": "', '", "parameters": ', "}", None, ""),
    "fenced": ToolFormat("<begin><call>function<sep>", "\n```json\n", "\n```</call>", "\n<call>function<sep>", "<end>"),
}


@dataclass(frozen=True)
class Call:
    """What is meant."""

    name: str
    arguments: dict[str, Any]


def written(fmt: ToolFormat, calls: Sequence[Call]) -> str:
    """As a model writes it, with an id where the format has one."""
    pieces = [fmt.begin]
    for at, call in enumerate(calls):
        separator = fmt.call_separator or "" if at else ""
        pieces += [separator, call.name, fmt.name_end, _arguments(fmt, call), fmt.call_end]
    return "".join([*pieces, fmt.end]).replace(CALL_ID, "a" * ID_CHARS)


def _arguments(fmt: ToolFormat, call: Call) -> str:
    tags = fmt.tagged
    if tags is None:
        return json.dumps(call.arguments, ensure_ascii=False)
    shown = list[str]()
    for key, value in call.arguments.items():
        is_text = isinstance(value, str)
        told = value if is_text else json.dumps(value, ensure_ascii=False)
        shown += [tags.before_key, key, tags.after_text_key if is_text else tags.after_json_key, told, tags.after_value]
    return "".join(shown)


# -- messages of conversations with calls ------------------------------------------------------------------------------

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "Paint it."}


def call(arguments: Any = '{"a": 1}', call_id: Any = "c1", name: Any = "paint") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def result(text: str = "painted", call_id: Any = "c1") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
