"""Convert input items of `/v1/responses` to quire's internal form, which is that of OpenAI chat messages.

    message                                    ─► a message with its role
    reasoning · message · function_call …      ─► one assistant message for consecutive items
    function_call_output                       ─► a tool message
    compaction                                 ─► a user message with the summary

Ids and statuses of items are left out: clients regenerate them, and a model does not need them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.openai.compaction import is_triggered, summary_message
from quire.api.dialects.openai.schemas import ResponseFields
from quire.api.dialects.resent_calls import resent_call, resent_result
from quire.api.http.errors import ApiError, invalid
from quire.client.request.conversation import NumberedMessages, ToolUse, checked_tool, tool_mode
from quire.client.request.params import Grammar

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
MEDIA_PARTS = ("input_image", "input_file")
ROLES = ("user", "assistant", "system", "developer")


def messages_of_items(fields: ResponseFields, images: ImagePolicy) -> NumberedMessages:
    """Return the messages of a body, in the internal form."""
    source = fields.input
    items: Sequence[Mapping[str, Any]] = [{"role": "user", "content": source}] if isinstance(source, str) else source
    return NumberedMessages.with_indices([*_messages(items[: -1 if is_triggered(fields) else None], images)])


def _messages(items: Sequence[Mapping[str, Any]], images: ImagePolicy) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each message with the index of its item; an assistant message has the index of its first item."""
    parts, first_index = list[dict[str, Any]](), 0
    for index, item in enumerate(items):
        part = _assistant_part(item, images)
        if part is not None:
            first_index = first_index if parts else index
            parts.append(part)
            continue
        if parts:
            yield _merge_parts(parts), first_index
            parts = []
        yield _other_message(item, images), index
    if parts:
        yield _merge_parts(parts), first_index


def _assistant_part(item: Mapping[str, Any], images: ImagePolicy) -> dict[str, Any] | None:
    """Return an item's part of an assistant message; None if the model did not generate the item."""
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            return {"content": _text(item.get("content"), images)}
        case "reasoning":
            reasoning = item.get("content") or item.get("summary") or ()
            return {"reasoning_content": _text(reasoning, images)}
        case "function_call":
            return {"tool_calls": [resent_call(item.get("call_id"), item.get("name"), item.get("arguments"))]}
    return None


def _merge_parts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge parts into one assistant message. Its keys are in order of their first appearance, after `content`."""
    values_by_name: dict[str, list[Any]] = {"content": []}
    for part in parts:
        for name, value in part.items():
            values_by_name.setdefault(name, []).append(value)
    message: dict[str, Any] = {"role": "assistant"}
    for name, values in values_by_name.items():
        message[name] = [call for calls in values for call in calls] if name == "tool_calls" else "".join(values)
    return message


def _other_message(item: Mapping[str, Any], images: ImagePolicy) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return resent_result(item.get("call_id"), item.get("output"), lambda output: _text(output, images))
    if kind == "compaction":
        return summary_message(item)
    if kind != "message":
        types = "message, reasoning, function_call, function_call_output or compaction"
        raise _invalid_input(f"expected input items of type {types}, got {str(kind)[:40]!r}")
    if item.get("role") not in ROLES:
        raise _invalid_input(f"expected one of the roles {', '.join(ROLES)}, got {str(item.get('role'))[:40]!r}")
    return {"role": item["role"], "content": _text(item.get("content"), images)}


def _text(content: Any, images: ImagePolicy) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise _invalid_input("expected a string or a list of parts as content")
    return "".join(_part(part, images) for part in content)


def _part(part: Mapping[str, Any], images: ImagePolicy) -> str:
    kind, text = part.get("type"), part.get("text", part.get("refusal"))
    if kind in TEXT_PARTS and isinstance(text, str):
        return text
    if kind in MEDIA_PARTS:
        return images.placeholder(str(kind))
    raise _invalid_input(f"expected message parts of type {', '.join(TEXT_PARTS[:3])}, got {str(kind)[:40]!r}")


def _invalid_input(message: str) -> ApiError:
    return invalid(message, "input", "invalid_parameter")


def response_tools(fields: ResponseFields) -> ToolUse:
    """Return the tools and the tool choice. Tools other than functions are dropped: this server cannot run them."""
    tools = [
        checked_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))
        for tool in fields.tools or ()
        if tool.get("type") == "function"
    ]
    mode, tool_name = tool_mode(fields.tool_choice)
    return ToolUse(tools, mode, tool_name, fields.parallel_tool_calls is not False)


def response_grammar(fields: ResponseFields) -> Grammar | None:
    """Return the grammar that the answer must match, if any."""
    text_format = (fields.text or {}).get("format") or {"type": "text"}
    match text_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.json_object()
        case {"type": "json_schema", "schema": Mapping() as schema}:
            return Grammar.json_schema(schema, "text")
    raise invalid("expected text.format of type text, json_object, or json_schema with a schema", "text")
