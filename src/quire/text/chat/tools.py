"""Tools that a client declares, validated once and normalized to one form for templates and grammars. Pure.

Fields without an effect on the model (caching hints, `strict`, ids) are dropped, so that they never reach a prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.errors import InvalidParameterError
from quire.text.chat.written_calls import content_of, with_text_calls
from quire.text.grammars.grammar import rewritten_schema
from quire.text.parsers.tool_format import HERMES, NAME_PATTERN

MAX_TOOLS = 256
ANNOTATIONS = frozenset({"description", "title", "$schema", "$comment", "default", "examples", "deprecated"})
"""Keywords of a JSON schema that do not constrain the output."""


class ToolMode(Enum):
    """Whether tools may or must be called."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """A JSON schema of an object; None: the tool has no parameters."""
    is_strict: bool = False
    """Arguments must satisfy the whole schema: the request is rejected if a part of the schema is not supported."""

    @property
    def declaration(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": dict(parameters)}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, with only the keywords that constrain the output."""
        schema = self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        core: dict[str, Any] = rewritten_schema(schema, _without_annotations)
        return core if core.get("type") == "object" or "$ref" in core else {**core, "type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether they may or must be called."""

    tools: Sequence[Tool] = ()
    mode: ToolMode = ToolMode.AUTO
    only: str | None = None
    """Name of the tool that must be called, if the request names one."""
    is_parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise InvalidParameterError(f"expected at most {MAX_TOOLS} tools, got {len(names)}", "tools")
        duplicate = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if duplicate is not None:
            raise InvalidParameterError(f"expected tools with different names, got {duplicate[:64]!r} twice", "tools")
        if self.only is not None and self.only not in names:
            raise InvalidParameterError(
                f"expected tool_choice to name one of the tools ({', '.join(names)[:300]}), got {self.only[:64]!r}",
                "tool_choice",
            )
        if self.mode is ToolMode.REQUIRED and not names:
            raise InvalidParameterError(
                "tool_choice requires a call, but the request has no tools; add some", "tool_choice"
            )

    @property
    def callable(self) -> Sequence[Tool]:
        if self.mode is ToolMode.NONE:
            return ()
        return [tool for tool in self.tools if self.only in (None, tool.name)]


NO_TOOLS = ToolUse()


def checked_tool(name: object, description: object, parameters: object, is_strict: object = False) -> Tool:
    """Return a tool with these fields. Raises InvalidParameterError if one is invalid."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        shown = repr(name)[:80]
        raise InvalidParameterError(
            f"expected a tool name of 1 to 128 letters, digits or any of _ . : / -, got {shown}", "tools"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidParameterError(f"expected the description of tool {name} to be a string", "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameterError(f"expected the parameters of tool {name} to be a JSON schema, an object", "tools")
    return Tool(name, description or "", parameters or None, is_strict is True)


def tools_of(declared: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the functions declared in the OpenAI API's format; other types of tools are dropped."""
    return [_function_tool(tool) for tool in declared if tool.get("type", "function") == "function"]


def _function_tool(declared: Mapping[str, Any]) -> Tool:
    function = declared.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameterError("expected a function with a name in a tool of type function", "tools")
    return checked_tool(
        function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


def tool_mode(choice: str | Mapping[str, Any] | None) -> tuple[ToolMode, str | None]:
    """Parse `tool_choice`: the mode, and the name of the tool that must be called. The name is in the object itself
    or in its `function`. Raises InvalidParameterError."""
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str) and choice in {mode.value for mode in ToolMode}:
        return ToolMode(choice), None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    holder = function if isinstance(function, Mapping) else choice if isinstance(choice, Mapping) else {}
    name = holder.get("name")
    if not isinstance(name, str):
        message = (
            "expected tool_choice to be auto, none, required, or an object of type function with a function's name"
        )
        raise InvalidParameterError(message, "tool_choice")
    return ToolMode.REQUIRED, name


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in schema.items() if name not in ANNOTATIONS}


# -- templates without support for tools -------------------------------------------------------------------------------


def with_written_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the conversation for a template without support for tools. The tools are described at the start of the
    system text; calls and results become text."""
    as_texts = [with_text_calls(message, index) for index, message in enumerate(messages)]
    system = _tools_text(tools)
    if as_texts and as_texts[0].get("role") == "system":
        return [{**as_texts[0], "content": f"{system}\n\n{content_of(as_texts[0], 0)}"}, *as_texts[1:]]
    return [{"role": "system", "content": system}, *as_texts]


def _tools_text(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.declaration["function"], ensure_ascii=False) for tool in tools)
    form = f"{HERMES.begin}NAME{HERMES.name_end}ARGUMENTS{HERMES.call_end}"
    return (
        "You have tools. Each line here describes one, with a JSON schema of its arguments:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call a tool, end your answer with its name and its arguments, a JSON object, in this form:\n{form}"
    )
