"""`/tokenize` and `/detokenize`: text to token ids and back, as the model's own tokenizer does it."""

import asyncio
from functools import partial
from typing import Any

from quire.api.body import beside_the_loop
from quire.api.limits import MAX_DETOKENIZE_TOKENS
from quire.api.models import Models, within_context
from quire.api.openai.chat import template_arguments
from quire.api.openai.meaning import OF_PROMPTS, refuse_added_tokens, refuse_of
from quire.api.openai.shapes import DetokenizeFields, TokenizeFields, read
from quire.api.refusals import invalid
from quire.engine.front import Front

TOKEN_BYTES = 4
"""About how much text a token is."""


async def tokenize(body: dict[str, Any], models: Models) -> dict[str, Any]:
    """The ids of a prompt or of a conversation."""
    fields: TokenizeFields = await asyncio.to_thread(read, TokenizeFields, body)
    refuse_of(body, OF_PROMPTS)
    model = models.named(fields.model)
    front = model.open()
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("tokenize takes a prompt or messages, one of the two", "prompt")
    with within_context(model):
        ids = await _ids(front, fields, body)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": front.text.max_sequence_tokens, "tokens": ids}
    if fields.return_token_strs:
        told["token_strs"] = await beside_the_loop(TOKEN_BYTES * len(ids), lambda: _strings(front, ids))
    return told


async def detokenize(body: dict[str, Any], models: Models) -> dict[str, Any]:
    """The text of some ids."""
    fields: DetokenizeFields = await asyncio.to_thread(read, DetokenizeFields, body)
    text = models.named(fields.model).open().text
    if len(fields.tokens) > MAX_DETOKENIZE_TOKENS:
        raise invalid(f"detokenize takes {MAX_DETOKENIZE_TOKENS} tokens, {len(fields.tokens)} given", "tokens")
    strange = next((one for one in fields.tokens if not 0 <= one < text.vocabulary_size), None)
    if strange is not None:
        raise invalid(f"tokens must lie between 0 and {text.vocabulary_size - 1}, {strange} given", "tokens")
    decode = partial(text.tokenizer.decode, fields.tokens, skip_special_tokens=False)
    return {"prompt": await beside_the_loop(TOKEN_BYTES * len(fields.tokens), decode)}


def _strings(front: Front, ids: list[int]) -> list[str]:
    tokenizer = front.text.tokenizer
    return [tokenizer.token_bytes(one).decode("utf-8", "replace") for one in ids]


async def _ids(front: Front, fields: TokenizeFields, body: dict[str, Any]) -> list[int]:
    if fields.prompt is not None:
        add = fields.add_special_tokens is not False
        return await front.text.tokenizer.encode_off_loop(fields.prompt, add_special_tokens=add)
    refuse_added_tokens(body)
    return await front.chat_ids(body["messages"], **template_arguments(fields))
