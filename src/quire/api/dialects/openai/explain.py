"""`/v1/cache/explain`: look up a chat or completion body in its tenant's prefix cache, without generating.

The dialect that would generate from the body also parses, resolves and tokenizes it here. So the explained prompt and
its cache group are exactly those of a generation request with the same body.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from pydantic import RootModel

from quire.api.access.admission import Admission
from quire.api.access.billing import Bill
from quire.api.dialects.answering import BodyEndpoint, Dialect, checked_names, limit_headers
from quire.api.dialects.cache_report import part_at
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.completions import Completions
from quire.api.dialects.openai.schemas import ChatFields, CompletionFields
from quire.api.dialects.resolved_request import ResolvedRequest, resolved
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


class Explaining(BodyEndpoint):
    """The endpoint of `/v1/cache/explain`."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        self._chat, self._completions = Chat(admission), Completions(admission)

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """Report how many of a prompt's tokens are cached, and why the next one is not."""
        models, caller = self._admission.models, bill.caller
        async with record.before_engine():
            parsed = await self.sized(record, len(body), lambda: parse_object(body))
            dialect: Dialect = self._chat if "messages" in parsed else self._completions
            fields = await self.run(record, lambda: dialect.parse(checked_names(parsed, dialect.names, record)))
            request = resolved(fields, models, caller, record)
            cache_group = request.cache_group or caller.tenant
            async with models.using(request.model, caller.tenant) as client:
                request = await self.run(record, lambda: _rendered(dialect, fields, request, client.text))
                (ids,) = request.prompts
                bill.settle(1, len(ids))
                found = await explained(request.model, models, ids, cache_group)
                num_lost = lost_tokens(len(ids), found.num_cached_tokens, client.text.info.block_size)
        part = part_body(part_at(request.parts, 0, found.position))
        response = {"object": "cache.explanation", "model": request.model.name, **explanation_body(found, cache_group)}
        response |= {"part": part, "lost_tokens": num_lost}
        await send_whole(send, msgspec.json.encode(response), limit_headers(caller))


def _rendered(dialect: Dialect, fields: Any, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
    with within_context(text.max_sequence_tokens):
        request = dialect.render(fields, request, text)
    if len(request.prompts) != 1:
        raise invalid(f"expected one prompt, got {len(request.prompts)}; send one request for each", "prompt")
    return request


async def explained(model: ModelEntry, models: Models, ids: list[int], cache_group: str) -> Explanation:
    """Explain why these tokens are not all cached. If none is, check whether another model has them cached."""
    found = await model.open().explain_ids(ids, cache_group)
    if found.reason != "first_seen" or found.num_cached_tokens:
        return found
    for other in models:
        if other is not model and await _has_cached(other, ids, cache_group):
            return replace(found, reason="other_namespace", differs=("model",), other_model=other.name)
    return found


async def _has_cached(model: ModelEntry, ids: list[int], cache_group: str) -> bool:
    """Whether a model has the prompt's first tokens cached for this cache group. False if it is not loaded."""
    if model.engine_client is None or max(ids) >= model.engine_client.text.vocabulary_size:
        return False
    with suppress(CapacityError, EngineDeadError):
        return (await model.engine_client.explain_ids(ids, cache_group)).num_cached_tokens > 0
    return False
