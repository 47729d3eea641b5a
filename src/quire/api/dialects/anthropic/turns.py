"""Messages of the Anthropic API as the one form that all conversations here have: that of the OpenAI API.

    system, a text or blocks              ─► a system message
    user       text                       ─► a user message
               tool_result                ─► a tool message each, before the text
    assistant  text, thinking, tool_use   ─► one assistant message with reasoning and tool calls

What clients change between two requests without changing the conversation is left out: caching hints, signatures,
and a header line that one client writes into its system text and that is another in every conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quire.api.dialects.anthropic.schemas import CountFields, MessageFields
from quire.api.dialects.images import Images
from quire.api.http.errors import invalid
from quire.client.request.conversation import NumberedMessages, Tool, ToolMode, ToolUse, checked_tool
from quire.client.request.params import Grammar

ROTATING = "x-anthropic-billing-header:"
"""How a block of a client's own accounting begins: it differs from conversation to conversation."""
TOOL_FIELDS = ("name", "description", "input_schema", "strict")
"""What is read of a tool."""
MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}


def messages_of_turns(fields: CountFields, images: Images) -> NumberedMessages:
    """Its messages, in the common form."""
    told = [(one, at) for at, message in enumerate(fields.messages) for one in _turns(message, images)]
    return NumberedMessages.of(told)


def system_message(fields: CountFields) -> list[dict[str, Any]]:
    """What stands before them, if anything does."""
    system = "\n".join(_system_texts(fields.system))
    return [{"role": "system", "content": system}] if system else []


def _system_texts(system: str | Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    for block in blocks:
        text = block.get("text")
        if block.get("type") != "text" or not isinstance(text, str):
            raise invalid("system must be a text, or blocks of type text", "system", "invalid_parameter")
        if not text.startswith(ROTATING):
            yield text


def _turns(message: MessageFields, images: Images) -> Iterator[dict[str, Any]]:
    if message.role not in ("user", "assistant", "system"):
        raise invalid(
            f"a role must be user, assistant or system, {message.role[:40]!r} given", "messages", "invalid_parameter"
        )
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    results = [block for block in blocks if block.get("type") == "tool_result"]
    texts = [_text(block, images) for block in blocks if block.get("type") != "tool_result"]
    for block in results:
        yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _result(block, images)}
    if texts or not results:
        yield {"role": message.role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        match block.get("type"):
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use" if isinstance(block.get("name"), str) and isinstance(block.get("input"), Mapping):
                arguments = msgspec.json.encode(block["input"]).decode()
                function = {"name": block["name"], "arguments": arguments}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case kind:
                raise _strange("an assistant's message", kind)
    told: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        told["reasoning_content"] = "\n".join(thoughts)
    return {**told, "tool_calls": calls} if calls else told


def _text(block: Mapping[str, Any], images: Images) -> str:
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            return str(block["text"])
        case "image" | "document" as kind:
            return images.text_for(kind)
        case kind:
            raise _strange("a message", kind)


def _result(block: Mapping[str, Any], images: Images) -> str:
    content = block.get("content")
    if isinstance(content, list) and all(isinstance(one, Mapping) for one in content):
        return "\n".join(_text(one, images) for one in content)
    if content is not None and not isinstance(content, str):
        raise invalid("a tool_result's content must be a text, or blocks", "messages", "invalid_parameter")
    return content or ""


def _strange(where: str, kind: object) -> Exception:
    message = f"{where} may have blocks of type text, thinking, tool_use and tool_result, {str(kind)[:40]!r} given"
    return invalid(message, "messages", "invalid_parameter")


def message_tools(fields: CountFields) -> ToolUse:
    """What may be called."""
    tools = [_tool(one) for one in known_tools(fields.tools or ())]
    choice = fields.tool_choice or {"type": "auto"}
    mode = MODES.get(str(choice.get("type")))
    if mode is None:
        raise invalid(f"tool_choice must be of type {', '.join(MODES)}", "tool_choice", "invalid_parameter")
    only = choice.get("name") if choice.get("type") == "tool" else None
    if only is not None and not isinstance(only, str):
        raise invalid("tool_choice of type tool must have a tool's name", "tool_choice", "invalid_parameter")
    return ToolUse(tools, mode, only, choice.get("disable_parallel_tool_use") is not True)


def known_tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is read of tools. Those that the API's own servers run are left out: no server here runs them."""
    own = [one for one in given if one.get("type") in (None, "custom")]
    return [{name: one[name] for name in TOOL_FIELDS if name in one} for one in own]


def _tool(given: Mapping[str, Any]) -> Tool:
    return checked_tool(given.get("name"), given.get("description"), given.get("input_schema"), given.get("strict"))


def output_grammar(fields: CountFields) -> Grammar | None:
    """What the answer must match."""
    given = (fields.output_config or {}).get("format")
    if given is None:
        return None
    if (
        not isinstance(given, Mapping)
        or given.get("type") != "json_schema"
        or not isinstance(given.get("schema"), Mapping)
    ):
        raise invalid("output_config.format must be of type json_schema, with a schema", "output_config")
    return Grammar.json_schema(given["schema"], "output_config")


def wants_thoughts(fields: CountFields) -> bool | None:
    """Whether the model is to think; None leaves it to the template."""
    kind = (fields.thinking or {}).get("type")
    return None if kind is None or kind == "adaptive" else kind == "enabled"


def thought_budget(fields: CountFields) -> int | None:
    """How many tokens it may think for; None: as many as it likes."""
    budget = (fields.thinking or {}).get("budget_tokens") if wants_thoughts(fields) else None
    if budget is not None and type(budget) is not int:
        raise invalid("thinking.budget_tokens must be a whole number", "thinking", "invalid_parameter")
    return budget
