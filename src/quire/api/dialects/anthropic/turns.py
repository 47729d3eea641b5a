"""Convert messages of the Anthropic API to quire's internal form, which is that of OpenAI chat messages.

    system, a string or blocks            ─► a system message
    user       text                       ─► a user message
               tool_result                ─► a tool message for each, before the text
    assistant  text, thinking, tool_use   ─► one assistant message with reasoning and tool calls

Data that clients change between requests without changing the conversation is left out: caching hints, signatures, and
a header line that one client writes into its system text and that differs in every conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.api.dialects.anthropic.schemas import CountFields, MessageFields
from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.resent_calls import resent_call, resent_result
from quire.api.http.errors import invalid
from quire.client.request.conversation import NumberedMessages, ThoughtBudget, Tool, ToolMode, ToolUse, checked_tool
from quire.client.request.params import Grammar

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a text block with accounting data of one client, which differs between conversations."""
TOOL_FIELDS = ("name", "description", "input_schema", "strict")
TOOL_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}


def messages_of_turns(fields: CountFields, images: ImagePolicy) -> NumberedMessages:
    """Return the messages of a body, in the internal form."""
    numbered = [(turn, index) for index, message in enumerate(fields.messages) for turn in _turns(message, images)]
    return NumberedMessages.with_indices(numbered)


def system_message(fields: CountFields) -> list[dict[str, Any]]:
    """Return the system message that precedes the others, if the body has a system text."""
    system = "\n".join(_system_texts(fields.system))
    return [{"role": "system", "content": system}] if system else []


def _system_texts(system: str | Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    for block in blocks:
        text = block.get("text")
        if block.get("type") != "text" or not isinstance(text, str):
            raise invalid("expected a string or blocks of type text as system", "system", "invalid_parameter")
        if not text.startswith(BILLING_PREFIX):
            yield text


def _turns(message: MessageFields, images: ImagePolicy) -> Iterator[dict[str, Any]]:
    if message.role not in ("user", "assistant", "system"):
        raise invalid(
            f"expected the role user, assistant or system, got {message.role[:40]!r}", "messages", "invalid_parameter"
        )
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    results = [block for block in blocks if block.get("type") == "tool_result"]
    texts = [_text(block, images) for block in blocks if block.get("type") != "tool_result"]
    for block in results:
        yield _result(block, images)
    if texts or not results:
        yield {"role": message.role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, reasoning, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        match block.get("type"):
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "thinking" if isinstance(block.get("thinking"), str):
                reasoning.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(resent_call(block.get("id"), block.get("name"), block.get("input")))
            case kind:
                raise _unknown_block("an assistant message", kind)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return {**message, "tool_calls": calls} if calls else message


def _text(block: Mapping[str, Any], images: ImagePolicy) -> str:
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            return str(block["text"])
        case "image" | "document" as kind:
            return images.placeholder(kind)
        case kind:
            raise _unknown_block("a message", kind)


def _result(block: Mapping[str, Any], images: ImagePolicy) -> dict[str, Any]:
    def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(_text(part, images) for part in parts)

    return resent_result(block.get("tool_use_id"), block.get("content"), text_of)


def _unknown_block(where: str, kind: object) -> Exception:
    message = f"expected blocks of type text, thinking, tool_use or tool_result in {where}, got {str(kind)[:40]!r}"
    return invalid(message, "messages", "invalid_parameter")


def message_tools(fields: CountFields) -> ToolUse:
    """Return the tools and the tool choice."""
    tools = [_tool(tool) for tool in known_tools(fields.tools or ())]
    choice = fields.tool_choice or {"type": "auto"}
    mode = TOOL_MODES.get(str(choice.get("type")))
    if mode is None:
        raise invalid(f"expected tool_choice of type {', '.join(TOOL_MODES)}", "tool_choice", "invalid_parameter")
    tool_name = choice.get("name") if choice.get("type") == "tool" else None
    if tool_name is not None and not isinstance(tool_name, str):
        raise invalid("expected the name of a tool in tool_choice of type tool", "tool_choice", "invalid_parameter")
    return ToolUse(tools, mode, tool_name, choice.get("disable_parallel_tool_use") is not True)


def known_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the known fields of custom tools. Tools that run on the vendor's servers are dropped."""
    custom = [tool for tool in tools if tool.get("type") in (None, "custom")]
    return [{name: tool[name] for name in TOOL_FIELDS if name in tool} for tool in custom]


def _tool(tool: Mapping[str, Any]) -> Tool:
    return checked_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict"))


def output_grammar(fields: CountFields) -> Grammar | None:
    """Return the grammar that the answer must match, if any."""
    output_format = (fields.output_config or {}).get("format")
    if output_format is None:
        return None
    if (
        not isinstance(output_format, Mapping)
        or output_format.get("type") != "json_schema"
        or not isinstance(output_format.get("schema"), Mapping)
    ):
        raise invalid("expected output_config.format of type json_schema, with a schema", "output_config")
    return Grammar.json_schema(output_format["schema"], "output_config")


def wants_reasoning(fields: CountFields) -> bool | None:
    """Return whether the model should produce reasoning; None leaves it to the chat template."""
    kind = (fields.thinking or {}).get("type")
    return None if kind is None or kind == "adaptive" else kind == "enabled"


def reasoning_budget(fields: CountFields, limits: Mapping[str, int]) -> ThoughtBudget | None:
    """Return the maximum number of reasoning tokens; None: no limit. `limits`: the operator's limits by effort."""
    budget = (fields.thinking or {}).get("budget_tokens") if wants_reasoning(fields) else None
    if budget is not None and type(budget) is not int:
        raise invalid("expected an integer as thinking.budget_tokens", "thinking", "invalid_parameter")
    effort = None if wants_reasoning(fields) is False else (fields.output_config or {}).get("effort")
    return ThoughtBudget.of(budget, effort, limits)
