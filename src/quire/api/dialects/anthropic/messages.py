"""`/v1/messages` and `/v1/messages/count_tokens`: a conversation in, a message of blocks out; or only its length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from quire.api.access.admission import Admission, AdmissionSettings
from quire.api.access.auth import Caller
from quire.api.dialects.anthropic.message_threads import Thread, check_thread, thread_of
from quire.api.dialects.anthropic.names import MESSAGES_NAMES
from quire.api.dialects.anthropic.schemas import CountFields, MessagesFields
from quire.api.dialects.anthropic.turns import (
    message_tools,
    messages_of_turns,
    output_grammar,
    system_message,
    thought_budget,
    wants_thoughts,
)
from quire.api.dialects.anthropic.writer import MessagesWriter
from quire.api.dialects.body_shapes import validated
from quire.api.dialects.dialect import ResolvedRequest
from quire.api.dialects.images import Images
from quire.api.dialects.request_options import request_options
from quire.api.http.errors import ApiError
from quire.api.http.headers import Headers
from quire.api.models.registry import Models
from quire.client.request.conversation import NumberedMessages, chat_prompt, converse
from quire.client.request.params import SamplingParams
from quire.client.request.text_model import TemplateArguments, TextModel
from quire.errors import RequestTooLargeError

Fields = TypeVar("Fields", bound=CountFields)


class AnthropicMessages:
    """Turns bodies into requests."""

    names = MESSAGES_NAMES

    def __init__(self, settings: AdmissionSettings) -> None:
        self._stable_prefix = settings.stable_prefix
        self._images = Images(settings.are_images_dropped)
        self._store = settings.store

    def parse(self, body: dict[str, Any]) -> MessagesFields:
        """Valid fields, or a refusal."""
        fields: MessagesFields = validated(MessagesFields, body)
        check_thread(fields, self._store)
        return fields

    def resolve(self, fields: MessagesFields, models: Models, caller: Caller, headers: Headers) -> ResolvedRequest:
        """The model, tenant and priority of a body."""
        return ResolvedRequest(models.named(fields.model), request_options(caller, headers), bool(fields.stream))

    def render(
        self, fields: MessagesFields, request: ResolvedRequest, text: TextModel
    ) -> tuple[ResolvedRequest, MessagesWriter]:
        """The prompt in tokens. An answer is as long as there is room: clients request more than models have."""
        thread = thread_of(fields, self._store, request.options.tenant)
        new = messages_of_turns(fields, self._images)
        fields, messages = _conversation(fields, thread, new)
        use, cleaned = message_tools(fields), self._stable_prefix.cleaned(messages)
        with _raising_too_long(text):
            budget, grammar = thought_budget(fields), output_grammar(fields)
            conversation = converse(text, cleaned.messages, use, grammar, budget, _arguments(fields))
        room = text.max_sequence_tokens - len(conversation.ids)
        if room < 1:
            raise too_long(len(conversation.ids), text.max_sequence_tokens)
        sampling: dict[str, Any] = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k}
        params = SamplingParams(
            max_tokens=min(fields.max_tokens, room),
            stop=fields.stop_sequences or (),
            **{name: value for name, value in sampling.items() if value is not None},
        )
        params, writer = conversation.applied(params), MessagesWriter(request.model.name)
        keep = None if thread is None else thread.keeping(writer.message_id, new)
        ids, parts, removed = conversation.ids, conversation.prompt.parts, cleaned.removed
        return replace(request, prompts=[ids], params=params, parts=[parts], removed=removed, keep=keep), writer


async def count_tokens(body: dict[str, Any], admission: Admission, caller: Caller) -> bytes:
    """How many tokens a conversation has, with the stored part of its thread."""
    settings, pool = admission.settings, admission.text_pool

    def checked() -> CountFields:
        fields: CountFields = validated(CountFields, body)
        check_thread(fields, settings.store)
        return fields

    def counted(fields: CountFields, text: TextModel) -> bytes:
        new = messages_of_turns(fields, Images(settings.are_images_dropped))
        fields, messages = _conversation(fields, thread_of(fields, settings.store, caller.tenant), new)
        with _raising_too_long(text):
            cleaned = settings.stable_prefix.cleaned(messages).messages
            prompt = chat_prompt(text, cleaned, message_tools(fields), _arguments(fields))
        return msgspec.json.encode({"input_tokens": len(prompt.ids)})

    fields = await pool.run(caller.tenant, checked)
    async with admission.models.using(admission.models.named(fields.model), caller.tenant) as client:
        return await pool.run(caller.tenant, lambda: counted(fields, client.text))


def _conversation(fields: Fields, thread: Thread | None, new: NumberedMessages) -> tuple[Fields, NumberedMessages]:
    """A body with the fields that it omitted, and all messages."""
    if thread is None:
        return fields, new.behind(system_message(fields))
    filled: Fields = thread.filled(fields)
    return filled, new.behind([*system_message(filled), *thread.stored.messages])


@contextmanager
def _raising_too_long(text: TextModel) -> Iterator[None]:
    try:
        yield
    except RequestTooLargeError as error:
        raise too_long(text.max_sequence_tokens + 1, text.max_sequence_tokens) from error


def _arguments(fields: CountFields) -> TemplateArguments:
    return TemplateArguments(enable_thinking=wants_thoughts(fields))


def too_long(num_tokens: int, limit: int) -> ApiError:
    """Clients of this API match this text. A prompt is counted up to the first token too many."""
    return ApiError(400, "context_length_exceeded", f"prompt is too long: {num_tokens} tokens > {limit} maximum")
