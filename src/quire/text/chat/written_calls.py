"""Writes tool calls and their results as text, for templates that have no form for them or reject them. Pure.

Clients resend calls that no template expects: arguments that are not JSON, because a model's answer was cut; a result
whose call was dropped, or a call whose run was cancelled. Rejecting them would end a conversation for ever, because
the client resends them with each request. `forms` lists the forms of a conversation, the most faithful first:

    as it is                   many templates show such calls well enough
    broken calls as text       arguments that are not an object, and calls and results that do not belong together
    all calls as text          consecutive messages of one role are joined, because some templates require it
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.text.chat.rendering.messages import calls_of, read_arguments, texts_of
from quire.text.parsers.tool_format import HERMES

NumberedMessage = tuple[int, Mapping[str, Any]]
"""A message, with the index of the first message that it was made from."""


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has calls or results."""
    return all(isinstance(message, Mapping) for message in messages) and any(
        message.get("tool_calls") or message.get("role") == "tool" for message in messages
    )


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[NumberedMessage]]:
    """Yield the forms of a conversation with calls."""
    yield [*enumerate(messages)]
    yield [*enumerate(_with_broken_as_text(messages))]
    yield _joined([with_text_calls(message, index) for index, message in enumerate(messages)])


def with_text_calls(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message with its calls, or its result, as text."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content_of(message, index)}\n</tool_response>"}
    calls = calls_of(message, index)
    return _with_written(message, index, [], calls) if calls else dict(message)


def content_of(message: Mapping[str, Any], index: int) -> str:
    """Return the text of a message."""
    return "".join(texts_of(message, index))


def _with_written(message: Mapping[str, Any], index: int, kept: list[Any], written: Sequence[Any]) -> dict[str, Any]:
    """Return a message with some calls kept and the others written after its text."""
    texts = [content_of(message, index), *map(_call_text, written)]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    content = "\n".join(text for text in texts if text)
    return {**others, "content": content, **({"tool_calls": kept} if kept else {})}


def _call_text(call: Any) -> str:
    function = _function_of(call)
    arguments = read_arguments(function.get("arguments"))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{HERMES.begin}{function.get('name', '')}{HERMES.name_end}{text}{HERMES.call_end}"


def _function_of(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _with_broken_as_text(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    whole_calls, whole_results = _pairs(messages)
    for index, message in enumerate(messages):
        calls = [*enumerate(calls_of(message, index))]
        kept = [call for at, call in calls if (index, at) in whole_calls]
        written = [call for at, call in calls if (index, at) not in whole_calls]
        if message.get("role") == "tool" and index not in whole_results:
            yield with_text_calls(message, index)
        else:
            yield _with_written(message, index, kept, written) if written else dict(message)


def _pairs(messages: Sequence[Mapping[str, Any]]) -> tuple[set[tuple[int, int]], set[int]]:
    """Return the positions of whole calls with a result (message, call), or at the end, where it may follow; and the
    indexes of these results."""
    calls, results = set[tuple[int, int]](), set[int]()
    open_calls: list[tuple[tuple[int, int], Any]] = []
    for index, message in enumerate(messages):
        if message.get("role") != "tool":
            numbered = enumerate(calls_of(message, index))
            open_calls = [((index, at), call.get("id")) for at, call in numbered if _is_whole(call)]
            continue
        result_id = message.get("tool_call_id")
        for entry in open_calls:
            if not (result_id and entry[1]) or entry[1] == result_id:
                open_calls.remove(entry)
                calls.add(entry[0])
                results.add(index)
                break
        else:
            open_calls = []  # this result becomes a text, and no result may follow a text
    return calls.union(position for position, _ in open_calls), results


def _is_whole(call: Any) -> bool:
    function = _function_of(call)
    is_named = isinstance(function.get("name"), str) and bool(function["name"])
    return is_named and isinstance(read_arguments(function.get("arguments")), dict)


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[NumberedMessage]:
    """Join consecutive messages of one role."""
    result: list[NumberedMessage] = []
    for index, message in enumerate(messages):
        if result and result[-1][1].get("role") == message.get("role"):
            first, last = result[-1]
            content = f"{content_of(last, first)}\n{content_of(message, index)}"
            result[-1] = first, {**last, "content": content}
        else:
            result.append((index, message))
    return result
