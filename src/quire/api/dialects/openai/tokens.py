"""`/tokenize` and `/detokenize`: text to token ids and back, as the model's own tokenizer does it.

All of it runs in the tenant's turn beside the event loop: both bodies and responses may be megabytes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire.api.access.admission import Admission
from quire.api.access.auth import Caller
from quire.api.dialects.openai.chat import template_arguments
from quire.api.dialects.openai.fields import ADDED_TOKENS, OF_PROMPTS, refuse_of
from quire.api.dialects.openai.schemas import DetokenizeFields, TokenizeFields, parse_fields
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_DETOKENIZE_TOKENS
from quire.api.models.registry import within_context
from quire.client.request.conversation import ToolUse, chat_prompt, tools_of
from quire.client.request.text_model import TextModel

TextFields = TypeVar("TextFields", TokenizeFields, DetokenizeFields)


async def tokenize(body: dict[str, Any], admission: Admission, caller: Caller) -> bytes:
    """The ids of a prompt or of a conversation."""
    stable_prefix = admission.settings.stable_prefix

    def tokenized(fields: TokenizeFields, body: dict[str, Any], text: TextModel) -> dict[str, Any]:
        if fields.messages is not None:
            body = {**body, "messages": stable_prefix.cleaned(body["messages"]).messages}
        return _tokenized(fields, body, text)

    return await _processed(_tokenize_fields, tokenized, body, admission, caller)


async def detokenize(body: dict[str, Any], admission: Admission, caller: Caller) -> bytes:
    """The text of some ids."""
    return await _processed(_detokenize_fields, _detokenized, body, admission, caller)


async def _processed(
    parse: Callable[[dict[str, Any]], TextFields],
    make: Callable[[TextFields, dict[str, Any], TextModel], dict[str, Any]],
    body: dict[str, Any],
    admission: Admission,
    caller: Caller,
) -> bytes:
    pool, models = admission.text_pool, admission.models
    fields = await pool.run(caller.tenant, lambda: parse(body))
    async with models.using(models.named(fields.model), caller.tenant) as client:
        return await pool.run(caller.tenant, lambda: msgspec.json.encode(make(fields, body, client.text)))


def _tokenize_fields(body: dict[str, Any]) -> TokenizeFields:
    fields: TokenizeFields = parse_fields(TokenizeFields, body)
    refuse_of(body, OF_PROMPTS)
    return fields


def _detokenize_fields(body: dict[str, Any]) -> DetokenizeFields:
    fields: DetokenizeFields = parse_fields(DetokenizeFields, body)
    return fields


def _tokenized(fields: TokenizeFields, body: dict[str, Any], text: TextModel) -> dict[str, Any]:
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("expected either a prompt or messages", "prompt")
    with within_context(text.max_sequence_tokens):
        ids = _ids(text, fields, body)
    response: dict[str, Any] = {"count": len(ids), "max_model_len": text.max_sequence_tokens, "tokens": ids}
    if fields.return_token_strs:
        response["token_strs"] = [text.tokenizer.token_bytes(one).decode("utf-8", "replace") for one in ids]
    return response


def _detokenized(fields: DetokenizeFields, _body: dict[str, Any], text: TextModel) -> dict[str, Any]:
    if len(fields.tokens) > MAX_DETOKENIZE_TOKENS:
        raise invalid(f"expected at most {MAX_DETOKENIZE_TOKENS} tokens, got {len(fields.tokens)}", "tokens")
    strange = next((one for one in fields.tokens if not 0 <= one < text.vocabulary_size), None)
    if strange is not None:
        raise invalid(f"expected tokens between 0 and {text.vocabulary_size - 1}, got {strange}", "tokens")
    return {"prompt": text.tokenizer.decode(fields.tokens, skip_special_tokens=False)}


def _ids(text: TextModel, fields: TokenizeFields, body: dict[str, Any]) -> list[int]:
    if fields.prompt is not None:
        return text.tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    refuse_of(body, ADDED_TOKENS)
    use = ToolUse(tools_of(fields.tools or ()))
    return chat_prompt(text, body["messages"], use, template_arguments(fields)).ids
