"""The names that bodies of the Anthropic API may have here."""

from quire.api.dialects.anthropic.schemas import CountFields, MessagesFields
from quire.api.dialects.field_names import FieldNames, names

TOOL = FieldNames(
    frozenset(("name", "description", "input_schema", "type", "strict", "cache_control")), types=("custom", None)
)
"""Every prompt is cached: a hint to cache needs no action."""
NESTED = {
    "messages": names("role content"),
    "tools": TOOL,
    "tool_choice": names("type name disable_parallel_tool_use"),
    "thinking": names("type budget_tokens"),
    "output_config": names("", format=names("type schema")),
    "thread": names("type previous_message_id"),
}
COUNT_NAMES = FieldNames(frozenset((*CountFields.model_fields, "cache_control")), NESTED)
MESSAGES_NAMES = FieldNames(frozenset((*MessagesFields.model_fields, "cache_control")), NESTED)
