"""The names that bodies of the OpenAI API may have here: the fields of their shapes, and what is refused by name."""

from collections.abc import Iterable

from quire.api.dialects.body_shapes import Loose
from quire.api.dialects.field_names import FieldNames, names
from quire.api.dialects.openai.fields import ADDED_TOKENS, NOT_OF_CHATS, NOT_OF_COMPLETIONS, OF_PROMPTS
from quire.api.dialects.openai.grammars import MAKERS
from quire.api.dialects.openai.schemas import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    StreamOptionsFields,
    TokenizeFields,
)

JUDGED = ("modalities", "length_penalty")
"""Refused if they say anything else than what is done."""


def _of(shape: type[Loose], *others: Iterable[str], **inside: FieldNames) -> FieldNames:
    """The fields of a shape, and others that are looked at in a body as it came."""
    return FieldNames(frozenset(shape.model_fields).union(*others, inside), inside)


STREAM_OPTIONS = _of(StreamOptionsFields)
SCHEMA = names("schema name description strict")
FUNCTION = "name description parameters strict"
CHAT_TOOLS = FieldNames(frozenset(("type", "function")), {"function": names(FUNCTION)}, ("function", None))
TOOL_CHOICE = FieldNames(
    frozenset(("type", "function", "name")), {"function": names("name")}, ("function",), is_open=True
)
MESSAGE = FieldNames(
    frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal")),
    is_open=True,
)
ITEM = FieldNames(
    frozenset(("type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary")),
    is_open=True,
)
SAMPLING = {
    "stream_options": STREAM_OPTIONS,
    "response_format": names("type", json_schema=SCHEMA),
    "structured_outputs": FieldNames(frozenset(MAKERS)),
}
CHAT_NAMES = _of(
    ChatFields, NOT_OF_CHATS, JUDGED, **SAMPLING, messages=MESSAGE, tools=CHAT_TOOLS, tool_choice=TOOL_CHOICE
)
COMPLETION_NAMES = _of(CompletionFields, NOT_OF_COMPLETIONS, JUDGED, **SAMPLING)
RESPONSE_NAMES = _of(
    ResponseFields,
    ("conversation", "prompt", "background"),
    input=ITEM,
    text=names("", format=names(f"type {' '.join(SCHEMA.read)}")),
    reasoning=names("effort"),
    tools=FieldNames(frozenset(("type", *FUNCTION.split())), types=("function",)),
    tool_choice=TOOL_CHOICE,
)
TOKENIZE_NAMES = _of(TokenizeFields, OF_PROMPTS, ADDED_TOKENS, messages=MESSAGE, tools=CHAT_TOOLS)
DETOKENIZE_NAMES = _of(DetokenizeFields)
