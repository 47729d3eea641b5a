"""`/v1/responses`: items in, items out. A conversation is sent whole every time, or continued by an id."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Caller
from quire.api.access.conversation_store import KeptConversation
from quire.api.dialects.dialect import ResolvedRequest
from quire.api.dialects.images import Images
from quire.api.dialects.keeping import answer_message, keeping
from quire.api.dialects.openai.fields import RESPONSE_NAMES, TIERS
from quire.api.dialects.openai.response_items import messages_of_items, response_grammar, response_tools
from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ResponseFields, parse_fields
from quire.api.dialects.request_options import request_options
from quire.api.http.errors import ApiError, shortened, unsupported
from quire.api.http.headers import Headers
from quire.api.models.registry import Models
from quire.client.reply.outputs import Answer
from quire.client.request.conversation import converse
from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TemplateArguments, TextModel
from quire.core.request import PriorityClass
from quire.errors import RequestTooLargeError

ELSEWHERE = ("conversation", "prompt")
"""Stored by a service that is not here."""


class Responses:
    """Turns bodies into requests."""

    names = RESPONSE_NAMES

    def __init__(self, settings: AdmissionSettings) -> None:
        self._stable_prefix = settings.stable_prefix
        self._images = Images(settings.are_images_dropped)
        self._store = settings.store

    def parse(self, body: dict[str, Any]) -> ResponseFields:
        """Valid fields, or a refusal."""
        fields: ResponseFields = parse_fields(ResponseFields, {**body, "prompt": None})
        for name in ELSEWHERE:
            if body.get(name):
                raise unsupported(name, "send the whole conversation as input")
        if fields.previous_response_id and self._store is None:
            reason = "this server stores no responses; send the whole conversation as input, or start it with --store"
            raise unsupported("previous_response_id", reason)
        if body.get("background"):
            raise unsupported("background", "a response is sent only to the client that waits for it")
        return fields

    def resolve(self, fields: ResponseFields, models: Models, caller: Caller, headers: Headers) -> ResolvedRequest:
        """The model, tenant and priority of a body."""
        tier = TIERS.get(fields.service_tier or "", PriorityClass.NORMAL)
        return ResolvedRequest(models.named(fields.model), request_options(caller, headers, tier), bool(fields.stream))

    def render(
        self, fields: ResponseFields, request: ResolvedRequest, text: TextModel
    ) -> tuple[ResolvedRequest, ItemsWriter]:
        """The prompt in tokens. An answer is as long as there is room."""
        effort = (fields.reasoning or {}).get("effort")
        arguments = TemplateArguments(extra={"reasoning_effort": effort} if isinstance(effort, str) else {})
        tenant = request.options.tenant
        kept, new = self._history(fields, tenant), messages_of_items(fields, self._images)
        stored, cleaned = [*kept, *new], self._stable_prefix.cleaned(new.behind([*_instructions(fields), *kept]))
        use, grammar = response_tools(fields), response_grammar(fields)
        conversation = converse(text, cleaned.messages, use, grammar, arguments=arguments)
        room = text.max_sequence_tokens - len(conversation.ids)
        if room < 1:
            raise RequestTooLargeError(f"got {len(conversation.ids)} tokens in the input; shorten it")
        sampling = {"temperature": fields.temperature, "top_p": fields.top_p}
        limit = fields.max_output_tokens
        params = SamplingParams(
            max_tokens=room if limit is None else min(limit, room),
            **{name: value for name, value in sampling.items() if value is not None},  # type: ignore[arg-type]
        )
        store = self._store if fields.store is not False else None
        writer = ItemsWriter(request.model.name, fields, is_kept=store is not None)
        keep = None
        if store is not None:
            keep = keeping(store, tenant, writer.response_id, KeptConversation(stored), sent_back, writer)
        ids, parts, params = conversation.ids, conversation.prompt.parts, conversation.applied(params)
        removed = cleaned.removed
        return replace(request, prompts=[ids], params=params, parts=[parts], removed=removed, keep=keep), writer

    def _history(self, fields: ResponseFields, tenant: str) -> Sequence[dict[str, Any]]:
        """The messages before, without their instructions."""
        last_id = fields.previous_response_id
        if not last_id or self._store is None:
            return ()
        found = self._store.find(tenant, last_id)
        if found is None:
            message = f"Previous response with id {shortened(last_id)} not found; send all of the conversation as input"
            raise ApiError(400, "previous_response_not_found", message, "previous_response_id")
        return found.messages


def sent_back(answer: Answer) -> list[dict[str, Any]]:
    """What a client would send back of an answer. One without any items leaves nothing to send."""
    has_items = answer.text or answer.reasoning or answer.tool_calls
    return [answer_message(answer, answer.tool_calls)] if has_items else []


def _instructions(fields: ResponseFields) -> list[dict[str, Any]]:
    return [{"role": "system", "content": fields.instructions}] if fields.instructions else []
