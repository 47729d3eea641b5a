"""`/v1/cache/explain`: a chat or completion body that is not run, only looked up in its tenant's cache.

The body is parsed, addressed and tokenized by the dialect that would have run it, so what is explained is exactly the
prompt that would have run, in the cache group it would have run in.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from pydantic import RootModel

from quire.api.access.billing import Bill
from quire.api.dialects.answering import BodyResponse, checked_names
from quire.api.dialects.cache_report import part_at
from quire.api.dialects.dialect import Dialect, ResolvedRequest
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.completions import Completions
from quire.api.dialects.openai.schemas import ChatFields, CompletionFields
from quire.api.http.body import parse_object
from quire.api.http.errors import invalid
from quire.api.http.request_record import RequestRecord
from quire.api.http.sse import Send, send_whole
from quire.api.models.registry import ModelEntry, Models, within_context
from quire.api.prefix.explanation_json import explanation_body, part_body
from quire.client.prefix.explanation import Explanation
from quire.client.prefix.reuse_log import lost_tokens
from quire.client.request.text_model import TextModel
from quire.errors import CapacityError, EngineDeadError


class ExplainBody(RootModel[ChatFields | CompletionFields]):
    """`POST /v1/cache/explain`: a body of `/v1/chat/completions` or of `/v1/completions`, with one prompt."""


class Explaining(BodyResponse):
    """Explains one prompt to its tenant."""

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """How much of a prompt would be found in the cache, and why the next token would not."""
        models, settings = self._admission.models, self._admission.settings
        async with record.before_engine():
            parsed = await self.sized(len(body), lambda: parse_object(body))
            dialect: Dialect = Chat(settings) if "messages" in parsed else Completions()
            fields = await self.run(lambda: dialect.parse(checked_names(parsed, dialect.names, record)))
            request = dialect.resolve(fields, models, self._caller, record.headers)
            cache_group = request.options.cache_group or self._caller.tenant
            async with models.using(request.model, self._caller.tenant) as client:
                request = await self.run(lambda: _rendered(dialect, fields, request, client.text))
                (ids,) = request.prompts
                bill.settle(1, len(ids))
                found = await explained(request.model, models, ids, cache_group)
                num_lost = lost_tokens(len(ids), found.num_cached_tokens, client.text.info.block_size)
        part = part_body(part_at(request.parts, 0, found.position))
        response = {"object": "cache.explanation", "model": request.model.name, **explanation_body(found, cache_group)}
        response |= {"part": part, "lost_tokens": num_lost}
        await send_whole(send, msgspec.json.encode(response), self.limits())


def _rendered(dialect: Dialect, fields: Any, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
    with within_context(text.max_sequence_tokens):
        request, _ = dialect.render(fields, request, text)
    if len(request.prompts) != 1:
        raise invalid(f"expected one prompt, got {len(request.prompts)}; send one request for each", "prompt")
    return request


async def explained(model: ModelEntry, models: Models, ids: list[int], cache_group: str) -> Explanation:
    """Why these tokens are not found; where none is, another model of this server may have them."""
    found = await model.open().explain_ids(ids, cache_group)
    if found.reason != "first_seen" or found.num_cached_tokens:
        return found
    for other in models:
        if other is not model and await _has_cached(other, ids, cache_group):
            return replace(found, reason="other_namespace", differs=("model",), other_model=other.name)
    return found


async def _has_cached(model: ModelEntry, ids: list[int], cache_group: str) -> bool:
    """Whether a model has the beginning of these tokens for the same cache group. One that is not loaded has none."""
    if model.engine_client is None or max(ids) >= model.engine_client.text.vocabulary_size:
        return False
    with suppress(CapacityError, EngineDeadError):
        return (await model.engine_client.explain_ids(ids, cache_group)).num_cached_tokens > 0
    return False
