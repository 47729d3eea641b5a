"""Tools for a model whose template knows none: told of in the system text, in words of ours, before all else that
stands there; calls and results as texts. Pure.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.chat.rendering.messages import calls_of, read_arguments, texts_of
from quire.text.chat.tools import Tool
from quire.text.parsers.tool_format import HERMES


def with_written_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The same conversation for a template that shows contents alone."""
    as_texts = [_as_text(message, index) for index, message in enumerate(messages)]
    system = _tools_text(tools)
    if as_texts and as_texts[0].get("role") == "system":
        return [{**as_texts[0], "content": f"{system}\n\n{_content(as_texts[0], 0)}"}, *as_texts[1:]]
    return [{"role": "system", "content": system}, *as_texts]


def _tools_text(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    form = f"{HERMES.begin}NAME{HERMES.name_end}ARGUMENTS{HERMES.call_end}"
    return (
        "You have tools. Each line here describes one, with a JSON schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call a tool, end your answer with its name and its arguments, a JSON object, in this form:\n{form}"
    )


def _as_text(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_content(message, index)}\n</tool_response>"}
    calls = calls_of(message, index)
    if not calls:
        return dict(message)
    texts = [_content(message, index), *map(_call_text, calls)]
    return {"role": message.get("role"), "content": "\n".join(text for text in texts if text)}


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    read = read_arguments(function.get("arguments"))
    shown = read if isinstance(read, str) else json.dumps(read, ensure_ascii=False)
    return f"{HERMES.begin}{function.get('name', '')}{HERMES.name_end}{shown}{HERMES.call_end}"


def _content(message: Mapping[str, Any], index: int) -> str:
    return "".join(texts_of(message, index))
