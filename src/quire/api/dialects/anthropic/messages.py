"""`/v1/messages` generates a message of content blocks; `/v1/messages/count_tokens` only counts the prompt's tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quire.api.access.conversation_store import KeptConversation
from quire.api.dialects.answering import Dialect, TextEndpoint
from quire.api.dialects.anthropic.message_threads import Fields, check_thread, fill_from_thread, thread_of
from quire.api.dialects.anthropic.schemas import COUNT_NAMES, MESSAGES_NAMES, CountFields, MessagesFields
from quire.api.dialects.anthropic.turns import (
    message_tools,
    messages_of_turns,
    output_grammar,
    reasoning_budget,
    system_message,
    wants_reasoning,
)
from quire.api.dialects.anthropic.writer import MessagesWriter
from quire.api.dialects.body_shapes import validated
from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.http.errors import ApiError
from quire.client.request.conversation import NumberedMessages, chat_prompt, converse, without_lines
from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TemplateArguments, TextModel
from quire.errors import RequestTooLargeError


class AnthropicMessages(Dialect):
    """The dialect of `/v1/messages`."""

    names = MESSAGES_NAMES

    def parse(self, body: dict[str, Any]) -> MessagesFields:
        fields: MessagesFields = validated(MessagesFields, body)
        check_thread(fields, self._admission.settings.store)
        return fields

    def render(self, fields: MessagesFields, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        """Limit max_tokens to what the context has left: clients of this API request more than models have."""
        settings = self._admission.settings
        thread = thread_of(fields, settings.store, request.tenant)
        new = messages_of_turns(fields, ImagePolicy(settings.are_images_dropped))
        fields, messages = _conversation(fields, thread, new)
        tools, (messages, removed) = message_tools(fields), without_lines(messages, settings.stable_prefix)
        with _converting_length_errors(text):
            budget, grammar = reasoning_budget(fields, settings.thought_limits), output_grammar(fields)
            conversation = converse(text, messages, tools, grammar, budget, _arguments(fields))
        room = text.max_sequence_tokens - len(conversation.ids)
        if room < 1:
            raise too_long(len(conversation.ids), text.max_sequence_tokens)
        sampling: dict[str, Any] = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
        params = SamplingParams(
            max_tokens=min(fields.max_tokens, room),
            stop=fields.stop_sequences or (),
            **{name: value for name, value in sampling.items() if value is not None},
        )
        stored = None if thread is None else KeptConversation([*thread.messages, *new], thread.fields)
        return request.with_chat(conversation, params, removed, stored)

    def writer(self, fields: MessagesFields, request: ResolvedRequest) -> MessagesWriter:
        return MessagesWriter(request.model.name, request.compared_id is not None)


class CountTokens(TextEndpoint):
    """The token count of a conversation, including the stored part of its thread."""

    names = COUNT_NAMES

    def parse(self, body: dict[str, Any]) -> CountFields:
        fields: CountFields = validated(CountFields, body)
        check_thread(fields, self._admission.settings.store)
        return fields

    def result(self, fields: CountFields, tenant: str, text: TextModel) -> dict[str, Any]:
        settings = self._admission.settings
        new = messages_of_turns(fields, ImagePolicy(settings.are_images_dropped))
        fields, messages = _conversation(fields, thread_of(fields, settings.store, tenant), new)
        with _converting_length_errors(text):
            messages, _ = without_lines(messages, settings.stable_prefix)
            prompt = chat_prompt(text, messages, message_tools(fields), _arguments(fields))
        return {"input_tokens": len(prompt.ids)}


def _conversation(
    fields: Fields, thread: KeptConversation | None, new: NumberedMessages
) -> tuple[Fields, Sequence[dict[str, Any]]]:
    """Return the body with its missing fields filled in, and all messages of the conversation."""
    if thread is None:
        return fields, new.preceded_by(system_message(fields))
    fields = fill_from_thread(fields, thread)
    return fields, new.preceded_by([*system_message(fields), *thread.messages])


@contextmanager
def _converting_length_errors(text: TextModel) -> Iterator[None]:
    try:
        yield
    except RequestTooLargeError as error:
        raise too_long(text.max_sequence_tokens + 1, text.max_sequence_tokens) from error


def _arguments(fields: CountFields) -> TemplateArguments:
    return TemplateArguments(enable_thinking=wants_reasoning(fields))


def too_long(num_tokens: int, limit: int) -> ApiError:
    """Return an error with the text that clients of this API match. `num_tokens` may be only limit + 1."""
    return ApiError(400, "context_length_exceeded", f"prompt is too long: {num_tokens} tokens > {limit} maximum")
