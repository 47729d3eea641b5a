"""Bodies of the Anthropic API. Those with a known name have a known type; others were checked before."""

from typing import Annotated, Any

from pydantic import Field

from quire.api.dialects.body_shapes import Loose, Objects, Texts
from quire.api.http.limits import MAX_MESSAGES


class MessageFields(Loose):
    """One message: its content is a text, or blocks."""

    role: str
    content: str | Objects


class CountFields(Loose):
    """`POST /v1/messages/count_tokens`, and what `/v1/messages` has in common with it."""

    model: str | None = Field(None, description="One of the names in /v1/models.")
    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="format: json_schema, with a schema.")
    thread: dict[str, Any] | None = None


class MessagesFields(CountFields):
    """`POST /v1/messages`."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None
    service_tier: str | None = None
    metadata: Any = None
    """Taken in any shape: nothing is done with it."""
