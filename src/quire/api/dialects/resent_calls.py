"""Tool calls and results that a client resends, in the internal form.

A broken one is converted as well as possible and never rejected, because the client would resend it with each request.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec


def resent_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """Return a call. Arguments that are not text, such as an object, are encoded as JSON."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    function = {"name": _text_or_empty(name), "arguments": text}
    return {"id": _text_or_empty(call_id), "type": "function", "function": function}


def resent_result(
    call_id: object, content: object, text_of: Callable[[Sequence[Mapping[str, Any]]], str]
) -> dict[str, Any]:
    """Return the message of a result; `text_of` converts content parts. Other content is encoded as JSON."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        text = text_of(content)
    elif content is None or isinstance(content, str):
        text = content or ""
    else:
        text = msgspec.json.encode(content).decode()
    return {"role": "tool", "tool_call_id": _text_or_empty(call_id), "content": text}


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""
