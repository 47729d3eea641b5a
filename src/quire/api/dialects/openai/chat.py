"""`/v1/chat/completions`: a conversation in, an assistant's message out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.access.auth import Caller
from quire.api.dialects.dialect import GenerationRequest, Target
from quire.api.dialects.openai.fields import (
    check_room,
    options,
    refuse_added_tokens,
    refuse_to_explain_nothing,
    reject_unsupported,
    sampling_params,
    service_tier,
    stream_options,
)
from quire.api.dialects.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs, within_bounds
from quire.api.dialects.openai.schemas import ChatFields, TemplateFields, TokenizeFields, parse_fields
from quire.api.http.errors import invalid, unsupported
from quire.api.models import Models
from quire.client.outputs import Piece
from quire.client.reply import Reply
from quire.client.text_model import TemplateArguments

FINISH = {"deadline": "length", "cancelled": "stop"}
"""Ends of ours in the API's words."""


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A body that was read: its fields, and its messages as they came."""

    fields: ChatFields
    messages: Sequence[Mapping[str, Any]]


class Chat:
    """Makes questions out of chat bodies."""

    def parse(self, body: dict[str, Any]) -> ParsedChat:
        """Valid fields, or a refusal."""
        fields: ChatFields = parse_fields(ChatFields, body)
        reject_unsupported(body)
        if body.get("echo"):
            raise unsupported("echo", "a conversation is not repeated; /v1/completions can echo a prompt")
        refuse_added_tokens(body)
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_parameter")
        return ParsedChat(fields, body["messages"])

    def target(self, asked: ParsedChat, models: Models, caller: Caller, headers: Mapping[bytes, bytes]) -> Target:
        """Whom it asks, and in whose name."""
        return Target(models.named(asked.fields.model), options(asked.fields, caller, headers))

    def generation(self, asked: ParsedChat, to: Target) -> GenerationRequest:
        """What it asks, in tokens."""
        fields, engine_client = asked.fields, to.model.open()
        limit = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        params = sampling_params(fields, max_tokens=limit, logprobs=logprobs)
        refuse_to_explain_nothing(fields, params)
        ids = engine_client.text.chat(asked.messages, **template_arguments(fields))
        check_room(to.model, len(ids), limit)
        names = TokenNames(engine_client.text.tokenizer, bool(fields.return_tokens_as_token_ids))
        writer = ChatWriter(names, service_tier(to.priority), bool(fields.logprobs), bool(fields.return_token_ids))
        return within_bounds(GenerationRequest(to, [ids], params, stream_options(fields), writer), num_prompt_times=1)


def template_arguments(fields: TemplateFields | TokenizeFields) -> TemplateArguments:
    """What the template is told; what was not said is left to it."""
    told: TemplateArguments = {}
    if fields.add_generation_prompt is not None:
        told["add_generation_prompt"] = fields.add_generation_prompt
    if fields.continue_final_message:
        told["continue_final_message"] = True
    if fields.documents:
        told["documents"] = fields.documents
    extra = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", fields.reasoning_effort)
    if extra:
        told["extra"] = extra
    return told


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """How a chat's answers are worded."""

    names: TokenNames
    tier: str
    with_logprobs: bool
    with_token_ids: bool
    id_prefix: str = "chatcmpl"
    object_name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def opening(self, prompt_index: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """The role, for each answer."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for one in reply.request.continuations
        ]

    def choice(self, prompt_index: int, piece: Piece) -> dict[str, Any] | None:
        """What was added."""
        if not piece.text and not piece.finish_reason and not (self.with_logprobs or self.with_token_ids):
            return None
        told = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text or not piece.finish_reason else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": finish_word(piece.finish_reason),
        }
        if piece.finish_reason:
            told["stop_reason"] = piece.stop_reason
        return told | ({"token_ids": list(piece.token_ids)} if self.with_token_ids else {})

    def whole(self, prompt_index: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """All answers."""
        return [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": finish_word(answer.finish_reason),
                "stop_reason": answer.stop_reason,
                **({"token_ids": list(answer.token_ids)} if self.with_token_ids else {}),
            }
            for answer in reply.completion().answers
        ]

    def extras(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        """The tier, and what was asked about the prompt."""
        (reply,) = replies
        told: dict[str, Any] = {"service_tier": self.tier, "system_fingerprint": None}
        if reply.request.params.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self.names)
        if self.with_token_ids:
            told["prompt_token_ids"] = list(reply.request.prompt)
        return told

    def _logprobs(self, said: Any) -> dict[str, Any] | None:
        return chat_logprobs(said.logprobs, self.names) if self.with_logprobs else None


def finish_word(reason: str | None) -> str | None:
    """Why an answer ended, in the API's words."""
    return None if reason is None else FINISH.get(reason, reason)
