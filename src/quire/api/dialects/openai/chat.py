"""`/v1/chat/completions`: a conversation in, an assistant's message out."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.api.access.admission import AdmissionSettings
from quire.api.access.auth import Caller
from quire.api.dialects.dialect import PieceBatch, ResolvedRequest
from quire.api.dialects.images import without_pictures
from quire.api.dialects.keeping import call_message
from quire.api.dialects.openai.chat_tools import call_delta, call_head, chat_tools
from quire.api.dialects.openai.fields import (
    CHAT_NAMES,
    NOT_OF_CHATS,
    TIER_OF,
    check_bounds,
    options,
    reject_unsupported,
    sampling_params,
)
from quire.api.dialects.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.api.dialects.openai.schemas import ChatFields, TemplateFields, TokenizeFields, parse_fields
from quire.api.dialects.openai.writer import ENCODER, FINISH, OpenAIWriter
from quire.api.http.errors import invalid
from quire.api.http.headers import Headers
from quire.api.models.registry import Models
from quire.client.reply.outputs import Answer, Piece, ReasoningPart, ToolCallPart
from quire.client.reply.reply import Reply
from quire.client.request.conversation import converse
from quire.client.request.text_model import Messages, TemplateArguments, TextModel

ParsedChat = tuple[ChatFields, Messages]
"""A parsed body: its fields, and its messages as they came."""


class Chat:
    """Turns chat bodies into requests."""

    names = CHAT_NAMES

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings

    def parse(self, body: dict[str, Any]) -> ParsedChat:
        """Valid fields, or a refusal."""
        fields: ChatFields = parse_fields(ChatFields, body)
        reject_unsupported(body, NOT_OF_CHATS)
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("expected logprobs to be true with top_logprobs", "top_logprobs", "invalid_parameter")
        return fields, without_pictures(body["messages"]) if self._settings.are_images_dropped else body["messages"]

    def resolve(self, parsed: ParsedChat, models: Models, caller: Caller, headers: Headers) -> ResolvedRequest:
        """The model, tenant and priority of a body."""
        fields, _ = parsed
        return ResolvedRequest(models.named(fields.model), options(fields, caller, headers), bool(fields.stream))

    def render(
        self, parsed: ParsedChat, request: ResolvedRequest, text: TextModel
    ) -> tuple[ResolvedRequest, "ChatWriter"]:
        """The prompt in tokens."""
        fields, cleaned = parsed[0], self._settings.stable_prefix.cleaned(parsed[1])
        messages, arguments = cleaned.messages, template_arguments(fields)
        limit = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        params = sampling_params(fields, max_tokens=limit, logprobs=logprobs)
        if fields.tools or fields.tool_choice or params.grammar is not None or not text.is_simple(messages):
            budget = fields.thinking_token_budget
            conversation = converse(text, messages, chat_tools(fields), params.grammar, budget, arguments)
            ids, parts, params = conversation.ids, conversation.prompt.parts, conversation.applied(params)
        else:
            ids, parts = text.chat_parts(messages, arguments)
        names = TokenNames(text.tokenizer, bool(fields.return_tokens_as_token_ids))
        writer = ChatWriter(request.model.name, fields, names, TIER_OF[request.options.priority])
        request = replace(request, prompts=[ids], params=params, parts=[parts], removed=cleaned.removed)
        check_bounds(request, text.max_sequence_tokens, num_prompt_times=1)
        return request, writer


def template_arguments(fields: TemplateFields | TokenizeFields) -> TemplateArguments:
    """Arguments of the template; those that the body omits are left to it."""
    extra = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", fields.reasoning_effort)
    return TemplateArguments(
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        documents=fields.documents or None,
        extra=extra,
    )


class ChatWriter(OpenAIWriter):
    """Assistants' messages, whole or by their deltas."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, model: str, fields: ChatFields, names: TokenNames, tier: str) -> None:
        super().__init__(model, fields)
        self._names = names
        self._tier = tier
        self._with_logprobs = bool(fields.logprobs)
        self._with_token_ids = bool(fields.return_token_ids)
        self._is_begun = False
        self._announced: set[tuple[int, int]] = set()
        """Answers and their calls that have begun."""

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """A chunk for each piece; before the first of them the role, for each answer."""
        choices = [] if self._is_begun else self._roles(replies[0])
        self._is_begun = True
        for _, piece in batch:
            choices += self._announcement(piece)
            if piece.delta or piece.finish_reason or self._with_logprobs or self._with_token_ids:
                choices.append(self._choice(piece))
        after = self.after_with_usage(replies) if self.with_usage_always else self.after
        return b"".join([self.before + ENCODER.encode(choice) + after for choice in choices])

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """All answers, the tier, and what was requested of the prompt."""
        (reply,) = replies
        choices = [
            {
                "index": answer.index,
                "message": self._message(answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": FINISH.get(answer.finish_reason, answer.finish_reason),
                "stop_reason": answer.stop_reason,
                **({"token_ids": list(answer.token_ids)} if self._with_token_ids else {}),
            }
            for answer in reply.completion().answers
        ]
        more: dict[str, Any] = {"service_tier": self._tier, "system_fingerprint": None}
        if reply.request.params.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self._names)
        if self._with_token_ids:
            more["prompt_token_ids"] = list(reply.request.prompt)
        return self.response(replies, choices, **more)

    def _message(self, answer: Answer) -> dict[str, Any]:
        content = answer.text if answer.text or not answer.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if answer.tool_calls:
            message["tool_calls"] = [call_message(call) for call in answer.tool_calls]
        return message

    def _announcement(self, piece: Piece) -> list[dict[str, Any]]:
        """The id and the name of a call that begins with this piece."""
        part = piece.part
        if not isinstance(part, ToolCallPart) or (piece.index, part.call_index) in self._announced:
            return []
        self._announced.add((piece.index, part.call_index))
        delta = {"tool_calls": [call_head(part)]}
        return [{"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _roles(self, reply: Reply) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for one in reply.request.continuations
        ]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "delta": _delta(piece) if piece.delta or not piece.finish_reason else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": FINISH.get(piece.finish_reason, piece.finish_reason),
        }
        if piece.finish_reason:
            choice["stop_reason"] = piece.stop_reason
        if self._with_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _logprobs(self, output: Piece | Answer) -> dict[str, Any] | None:
        return chat_logprobs(output.logprobs, self._names) if self._with_logprobs else None


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.part:
        case ToolCallPart() as part:
            return {"tool_calls": [call_delta(part, piece.delta)]}
        case ReasoningPart():
            return {"reasoning": piece.delta, "reasoning_content": piece.delta}
        case _:
            return {"content": piece.delta}
