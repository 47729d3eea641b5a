"""`/tokenize` and `/detokenize`: convert text to token ids and back with the model's tokenizer."""

from typing import Any

from quire.api.dialects.answering import TextEndpoint
from quire.api.dialects.openai.chat import template_arguments
from quire.api.dialects.openai.fields import ADDED_TOKENS, DETOKENIZE_NAMES, NOT_FOR_TOKENIZE, TOKENIZE_NAMES, refuse
from quire.api.dialects.openai.schemas import DetokenizeFields, TokenizeFields, parse_fields
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_DETOKENIZE_TOKENS
from quire.api.models.registry import prefix_context_errors
from quire.client.request.conversation import ToolUse, chat_prompt, tools_of, without_lines
from quire.client.request.text_model import TextModel


class Tokenize(TextEndpoint):
    """The token ids of a prompt or a conversation."""

    names = TOKENIZE_NAMES

    def parse(self, body: dict[str, Any]) -> TokenizeFields:
        fields: TokenizeFields = parse_fields(TokenizeFields, body)
        refuse(body, NOT_FOR_TOKENIZE)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("expected either a prompt or messages; send exactly one of them", "prompt")
        if fields.messages is not None:
            refuse(body, ADDED_TOKENS)
            fields.messages = body["messages"]  # the raw, validated messages, as in `Chat.parse`
        return fields

    def result(self, fields: TokenizeFields, tenant: str, text: TextModel) -> dict[str, Any]:
        with prefix_context_errors(text.max_sequence_tokens):
            ids = self._ids(text, fields)
        response: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_sequence_tokens, "tokens": ids}
        if fields.return_token_strs:
            response["token_strs"] = [text.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return response

    def _ids(self, text: TextModel, fields: TokenizeFields) -> list[int]:
        if fields.prompt is not None:
            return text.tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        messages, _ = without_lines(fields.messages or (), self._admission.settings.stable_prefix)
        return chat_prompt(text, messages, ToolUse(tools_of(fields.tools or ())), template_arguments(fields)).ids


class Detokenize(TextEndpoint):
    """The text of token ids."""

    names = DETOKENIZE_NAMES

    def parse(self, body: dict[str, Any]) -> DetokenizeFields:
        fields: DetokenizeFields = parse_fields(DetokenizeFields, body)
        if len(fields.tokens) > MAX_DETOKENIZE_TOKENS:
            raise invalid(f"expected at most {MAX_DETOKENIZE_TOKENS} tokens, got {len(fields.tokens)}", "tokens")
        return fields

    def result(self, fields: DetokenizeFields, tenant: str, text: TextModel) -> dict[str, Any]:
        unknown = next((token_id for token_id in fields.tokens if not 0 <= token_id < text.vocabulary_size), None)
        if unknown is not None:
            raise invalid(f"expected tokens between 0 and {text.vocabulary_size - 1}, got {unknown}", "tokens")
        return {"prompt": text.tokenizer.decode(fields.tokens, skip_special_tokens=False)}
