"""`/v1/responses`: generate output items from input items. A client resends the conversation, or continues it by id."""

from collections.abc import Sequence
from typing import Any

from quire.api.access.conversation_store import KeptConversation
from quire.api.dialects.answering import Dialect
from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.openai.compaction import (
    MAX_SUMMARY_TOKENS,
    SUMMARY_REQUEST,
    CompactedWriter,
    CompactionWriter,
    is_kept,
    is_triggered,
)
from quire.api.dialects.openai.fields import RESPONSE_NAMES
from quire.api.dialects.openai.response_items import messages_of_items, response_grammar, response_tools
from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ResponseFields, parse_fields
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.http.errors import ApiError, shortened, unsupported
from quire.client.request.conversation import ThoughtBudget, converse, summary_prompt, without_lines
from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TemplateArguments, TextModel
from quire.errors import RequestTooLargeError

OPENAI_STORED_FIELDS = ("conversation", "prompt")
"""Fields that refer to data stored by OpenAI's service, which is not available here."""


class Responses(Dialect):
    """The dialect of `/v1/responses`."""

    names = RESPONSE_NAMES

    def parse(self, body: dict[str, Any]) -> ResponseFields:
        fields: ResponseFields = parse_fields(ResponseFields, {**body, "prompt": None})
        for name in OPENAI_STORED_FIELDS:
            if body.get(name):
                raise unsupported(name, "send the whole conversation as input")
        if fields.previous_response_id and self._admission.settings.store is None:
            reason = "this server stores no responses; send the whole conversation as input, or start it with --store"
            raise unsupported("previous_response_id", reason)
        if body.get("background"):
            raise unsupported("background", "a response is sent only to the client that waits for it")
        if fields.prompt_cache_options is not None and fields.prompt_cache_options.prewarm:
            raise unsupported("prompt_cache_options", "prewarm is not available; send the prompt with one output token")
        return fields

    def render(self, fields: ResponseFields, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        """Limit max_output_tokens to what the context has left after the input."""
        settings, effort = self._admission.settings, (fields.reasoning or {}).get("effort")
        arguments = TemplateArguments(extra={"reasoning_effort": effort} if isinstance(effort, str) else {})
        history = self._history(fields, request.tenant)
        new = messages_of_items(fields, ImagePolicy(settings.are_images_dropped))
        messages, removed = without_lines(new.preceded_by([*_instructions(fields), *history]), settings.stable_prefix)
        if self._compacts(fields):
            conversation = summary_prompt(text, messages, SUMMARY_REQUEST, response_tools(fields), arguments)
        else:
            tools, grammar = response_tools(fields), response_grammar(fields)
            budget = ThoughtBudget.of(None, effort, settings.thought_limits)
            conversation = converse(text, messages, tools, grammar, budget, arguments)
        room = text.max_sequence_tokens - len(conversation.ids)
        if room < 1:
            raise RequestTooLargeError(f"got {len(conversation.ids)} tokens in the input; shorten it")
        sampling = {"temperature": fields.temperature, "top_p": fields.top_p}
        limit = MAX_SUMMARY_TOKENS if self._compacts(fields) else fields.max_output_tokens
        params = SamplingParams(
            max_tokens=room if limit is None else min(limit, room),
            stop_loops=self._compacts(fields),
            **{name: value for name, value in sampling.items() if value is not None},  # type: ignore[arg-type]
        )
        kept = [*filter(is_kept, [*history, *new])] if self._compacts(fields) else [*history, *new]
        stored = KeptConversation(kept) if self._is_stored(fields) else None
        return request.with_chat(conversation, params, removed, stored)

    def writer(self, fields: ResponseFields, request: ResolvedRequest) -> ItemsWriter:
        make = CompactionWriter if self._compacts(fields) else ItemsWriter
        return make(request.model.name, fields, is_stored=self._is_stored(fields))

    def _is_stored(self, fields: ResponseFields) -> bool:
        return self._admission.settings.store is not None and fields.store is not False

    def _compacts(self, fields: ResponseFields) -> bool:
        """Return whether the model writes a summary of the conversation instead of its next items."""
        return is_triggered(fields)

    def _history(self, fields: ResponseFields, tenant: str) -> Sequence[dict[str, Any]]:
        """Return the messages of the previous response's conversation, without its instructions."""
        last_id, store = fields.previous_response_id, self._admission.settings.store
        if not last_id or store is None:
            return ()
        conversation = store.find(tenant, last_id)
        if conversation is None:
            message = f"Previous response with id {shortened(last_id)} not found; send all of the conversation as input"
            raise ApiError(400, "previous_response_not_found", message, "previous_response_id")
        return conversation.messages


class Compact(Responses):
    """The dialect of `/v1/responses/compact`: a summary in place of the conversation, never streamed or stored."""

    def parse(self, body: dict[str, Any]) -> ResponseFields:
        fixed = {"input": body.get("input") or [], "stream": False, "store": False}
        return super().parse({**body, **fixed})

    def writer(self, fields: ResponseFields, request: ResolvedRequest) -> ItemsWriter:
        images = ImagePolicy(self._admission.settings.are_images_dropped)
        messages = [*self._history(fields, request.tenant), *messages_of_items(fields, images)]
        return CompactedWriter(request.model.name, fields, [*filter(is_kept, messages)])

    def _compacts(self, fields: ResponseFields) -> bool:
        return True


def _instructions(fields: ResponseFields) -> list[dict[str, Any]]:
    return [{"role": "system", "content": fields.instructions}] if fields.instructions else []
