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
from quire.api.dialects.answering import BodyEndpoint, Dialect, check_names, limit_headers
from quire.api.dialects.cache_report import part_at
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.completions import Completions
from quire.api.dialects.openai.schemas import ChatFields, CompletionFields
from quire.api.dialects.resolved_request import ResolvedRequest, resolve_request
from quire.api.http.body import parse_object
from quire.api.http.errors import invalid
from quire.api.http.request_record import RequestRecord
from quire.api.http.sse import Send, send_whole
from quire.api.models.registry import ModelEntry, Models, prefix_context_errors
from quire.api.prefix.explanation_json import explanation_body, part_body
from quire.client.prefix.explanation import Explanation
from quire.client.prefix.reuse_log import lost_tokens
from quire.client.request.text_model import TextModel
from quire.errors import CapacityError, EngineDeadError


class ExplainBody(RootModel[ChatFields | CompletionFields]):
    """`POST /v1/cache/explain`: a body of `/v1/chat/completions` or of `/v1/completions`, with one prompt."""


class ExplainEndpoint(BodyEndpoint):
    """The endpoint of `/v1/cache/explain`."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        self._chat, self._completions = Chat(admission), Completions(admission)

    async def answer(self, body: bytes, record: RequestRecord, bill: Bill, send: Send) -> None:
        """Report how many of a prompt's tokens are cached, and why the next one is not."""
        models, caller = self._admission.models, bill.caller
        async with record.before_engine():
            body_object = await self.run_sized(record, len(body), lambda: parse_object(body))
            dialect: Dialect = self._chat if "messages" in body_object else self._completions
            fields = await self.run(record, lambda: dialect.parse(check_names(body_object, dialect.names, record)))
            request = resolve_request(fields, models, caller, record)
            cache_group = request.cache_group or caller.tenant
            async with models.using(request.model, caller.tenant) as client:
                request = await self.run(record, lambda: _render(dialect, fields, request, client.text))
                (ids,) = request.prompts
                bill.settle(1, len(ids))
                explanation = await explain(request.model, models, ids, cache_group)
                num_lost = lost_tokens(len(ids), explanation.num_cached_tokens, client.text.info.block_size)
        part = part_body(part_at(request.parts, 0, explanation.position))
        response = {"object": "cache.explanation", "model": request.model.name}
        response |= explanation_body(explanation, cache_group) | {"part": part, "lost_tokens": num_lost}
        await send_whole(send, msgspec.json.encode(response), limit_headers(caller))


def _render(dialect: Dialect, fields: Any, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
    with prefix_context_errors(text.max_sequence_tokens):
        request = dialect.render(fields, request, text)
    if len(request.prompts) != 1:
        raise invalid(f"expected one prompt, got {len(request.prompts)}; send one request for each", "prompt")
    return request


async def explain(model: ModelEntry, models: Models, ids: list[int], cache_group: str) -> Explanation:
    """Explain why these tokens are not all cached. If none is cached, check whether another model has them cached."""
    explanation = await model.open().explain_ids(ids, cache_group)
    if explanation.reason != "first_seen" or explanation.num_cached_tokens:
        return explanation
    for other in models:
        if other is not model and await _has_cached(other, ids, cache_group):
            return replace(explanation, reason="other_namespace", differs=("model",), other_model=other.name)
    return explanation


async def _has_cached(model: ModelEntry, ids: list[int], cache_group: str) -> bool:
    """Return whether a model has the prompt's first tokens cached for this group; false if the model is not loaded."""
    if model.engine_client is None or max(ids) >= model.engine_client.text.vocabulary_size:
        return False
    with suppress(CapacityError, EngineDeadError):
        return (await model.engine_client.explain_ids(ids, cache_group)).num_cached_tokens > 0
    return False
