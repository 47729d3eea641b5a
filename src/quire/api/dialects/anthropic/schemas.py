"""Body schemas of the Anthropic API. Known fields are typed; unknown names were already handled by `field_names`."""

from typing import Annotated, Any

from pydantic import Field

from quire.api.dialects.body_shapes import GenerationFields, Objects, Schema, Texts
from quire.api.dialects.breakpoints import Breakpoint, block_breakpoints, keep_seconds
from quire.api.dialects.field_names import FieldNames, names
from quire.api.http.limits import MAX_MESSAGES


class MessageFields(Schema):
    """One message; its content is a string or a list of blocks."""

    role: str
    content: str | Objects


class CountFields(Schema):
    """`POST /v1/messages/count_tokens`, and the fields that `/v1/messages` has in common with it."""

    model: str | None = Field(None, description="One of the names in /v1/models.")
    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="format: json_schema, with a schema; effort.")
    thread: dict[str, Any] | None = None


class DiagnosticsFields(Schema):
    """`diagnostics`."""

    previous_message_id: str | None = None


class MessagesFields(CountFields, GenerationFields):
    """`POST /v1/messages`."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Texts | None = None
    service_tier: str | None = None
    metadata: Any = None
    """Accepted in any shape, and ignored."""
    diagnostics: DiagnosticsFields | None = Field(None, description="Report why an earlier prompt was not reused.")

    cache_control: dict[str, Any] | None = Field(None, description="With a ttl, the whole prompt is kept that long.")

    @property
    def compared_id(self) -> str | None:
        return None if self.diagnostics is None else self.diagnostics.previous_message_id

    @property
    def breakpoints(self) -> list[Breakpoint]:
        tools = [tool for tool in self.tools or () if tool.get("type") in TOOL.types]
        marks = [*block_breakpoints(self.system, "cache_control", None, "system", 0)]
        for index, tool in enumerate(tools):
            marks += block_breakpoints([tool], "cache_control", None, "tool", index)
        for index, message in enumerate(self.messages):
            marks += block_breakpoints(message.content, "cache_control", None, "message", index)
        if self.cache_control is not None and (ttl := self.cache_control.get("ttl")) is not None:
            marks.append(Breakpoint(keep_seconds(ttl, "cache_control")))
        return marks


# -- the names that bodies may have ------------------------------------------------------------------------------------

TOOL = FieldNames(
    frozenset(("name", "description", "input_schema", "type", "strict", "cache_control")), types=("custom", None)
)
NESTED = {
    "messages": names("role content"),
    "tools": TOOL,
    "tool_choice": names("type name disable_parallel_tool_use"),
    "thinking": names("type budget_tokens"),
    "output_config": names("effort", format=names("type schema")),
    "thread": names("type previous_message_id"),
}
COUNT_NAMES = FieldNames(frozenset((*CountFields.model_fields, "cache_control")), NESTED)
MESSAGES_NAMES = FieldNames(
    frozenset(MessagesFields.model_fields),
    {**NESTED, "diagnostics": names("previous_message_id")},
)
