"""Tools as a client declares them, checked once, and in the one form in which templates and grammars see them. Pure.

What does not change their meaning is left out (caching hints, `strict`, ids), so that it never reaches a prompt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.errors import InvalidParameterError
from quire.text.grammars.grammar import rewritten_schema
from quire.text.parsers.tool_format import NAME_PATTERN

MAX_TOOLS = 256
WITHOUT_MEANING = frozenset({"description", "title", "$schema", "$comment", "default", "examples", "deprecated"})
"""Words of a schema that say nothing of what an answer may be."""


class ToolMode(Enum):
    """Whether tools are called."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """Something a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """A JSON schema of an object; None: it takes no arguments."""
    is_strict: bool = False
    """Its arguments must fit all of the schema, or the request is refused."""

    @property
    def shown(self) -> dict[str, Any]:
        """As templates read it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": dict(parameters)}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """Of its arguments, with all that an answer must be and nothing else."""
        parameters_schema = self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        lean: dict[str, Any] = rewritten_schema(parameters_schema, _lean)
        return lean if lean.get("type") == "object" or "$ref" in lean else {**lean, "type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be used."""

    tools: Sequence[Tool] = ()
    mode: ToolMode = ToolMode.AUTO
    only: str | None = None
    """The one that must be called."""
    is_parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise InvalidParameterError(f"expected at most {MAX_TOOLS} tools, got {len(names)}", "tools")
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise InvalidParameterError(f"expected tools with different names, got {twice[:64]!r} twice", "tools")
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
    """A tool of these, or an error that says what is wrong."""
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
    """Tools as the OpenAI API declares them. All kinds other than functions are left out."""
    return [_function(one) for one in declared if one.get("type", "function") == "function"]


def _function(declared: Mapping[str, Any]) -> Tool:
    function = declared.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameterError("expected a function with a name in a tool of type function", "tools")
    return checked_tool(
        function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


def tool_mode(choice: str | Mapping[str, Any] | None) -> tuple[ToolMode, str | None]:
    """Whether tools are called, and the one that must be. A name stands in a function, or beside its type."""
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str) and choice in {mode.value for mode in ToolMode}:
        return ToolMode(choice), None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    named = function if isinstance(function, Mapping) else choice if isinstance(choice, Mapping) else {}
    name = named.get("name")
    if not isinstance(name, str):
        message = (
            "expected tool_choice to be auto, none, required, or an object of type function with a function's name"
        )
        raise InvalidParameterError(message, "tool_choice")
    return ToolMode.REQUIRED, name


def _lean(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in schema.items() if name not in WITHOUT_MEANING}
