"""`tools`, `tool_choice` and `parallel_tool_calls` of the OpenAI API, and calls on their way back."""

from typing import Any

from quire.api.dialects.openai.schemas import ChatFields
from quire.client.reply.outputs import ToolCallPart
from quire.client.request.conversation import ToolUse, tool_mode, tools_of


def chat_tools(fields: ChatFields) -> ToolUse:
    """What may be called. Other kinds of tools than functions are left out: this server cannot run them."""
    mode, only = tool_mode(fields.tool_choice)
    return ToolUse(tools_of(fields.tools or ()), mode, only, fields.parallel_tool_calls is not False)


def call_head(part: ToolCallPart) -> dict[str, Any]:
    """A call's first delta."""
    function = {"name": part.name, "arguments": ""}
    return {"index": part.call_index, "id": part.call_id, "type": "function", "function": function}


def call_delta(part: ToolCallPart, delta: str) -> dict[str, Any]:
    """What comes after it."""
    return {"index": part.call_index, "function": {"arguments": delta}}
