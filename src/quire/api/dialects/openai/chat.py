"""`/v1/chat/completions`: generate an assistant message from a conversation."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.api.dialects.answering import Dialect
from quire.api.dialects.images import without_images
from quire.api.dialects.openai.fields import (
    CHAT_NAMES,
    NOT_FOR_CHATS,
    TIER_OF,
    check_bounds,
    reject_unsupported,
    sampling_params,
)
from quire.api.dialects.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.api.dialects.openai.schemas import ChatFields, TemplateFields, parse_fields
from quire.api.dialects.openai.writer import OpenAIWriter, finish_fields
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.dialects.response_writer import PieceBatch, call_message
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_ANSWERS
from quire.client.reply.outputs import Answer, Piece, ReasoningPart, ToolCallPart
from quire.client.reply.reply import Reply
from quire.client.request.conversation import ThoughtBudget, ToolUse, converse, tool_mode, tools_of, without_lines
from quire.client.request.text_model import TemplateArguments, TextModel


class Chat(Dialect):
    """The dialect of `/v1/chat/completions`."""

    names = CHAT_NAMES

    def parse(self, body: dict[str, Any]) -> ChatFields:
        fields: ChatFields = parse_fields(ChatFields, body)
        reject_unsupported(body, NOT_FOR_CHATS)
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("expected logprobs to be true with top_logprobs", "top_logprobs", "invalid_parameter")
        # Use the raw messages, now that they are validated: templates read more fields than the schema has.
        messages: Any = body["messages"]
        fields.messages = without_images(messages) if self._admission.settings.are_images_dropped else messages
        return fields

    def render(self, fields: ChatFields, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        messages, removed = without_lines(fields.messages, self._admission.settings.stable_prefix)
        arguments = template_arguments(fields)
        limit = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        params = sampling_params(fields, max_tokens=limit, logprobs=logprobs)
        if fields.tools or fields.tool_choice or params.grammar is not None or not text.is_simple(messages):
            limits = self._admission.settings.thought_limits
            budget = ThoughtBudget.of(fields.thinking_token_budget, fields.reasoning_effort, limits)
            conversation = converse(text, messages, _tools_of(fields), params.grammar, budget, arguments)
            ids, parts, params = conversation.ids, conversation.parts, conversation.apply_to(params)
        else:
            ids, parts = text.chat_parts(messages, arguments)
        request = replace(request, prompts=[ids], params=params, parts=[parts], removed=removed)
        check_bounds(request, text.max_sequence_tokens, num_prompt_times=1)
        return request

    def writer(self, fields: ChatFields, request: ResolvedRequest) -> "ChatWriter":
        return ChatWriter(request.model.name, fields, TIER_OF[request.priority])


def _tools_of(fields: ChatFields) -> ToolUse:
    """Return the tools and the tool choice. Tools other than functions are dropped: this server cannot run them."""
    mode, tool_name = tool_mode(fields.tool_choice)
    return ToolUse(tools_of(fields.tools or ()), mode, tool_name, fields.parallel_tool_calls is not False)


def template_arguments(fields: TemplateFields) -> TemplateArguments | None:
    """Return the chat template's arguments; omitted fields keep the template's defaults. None: all are omitted."""
    extra = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", fields.reasoning_effort)
    arguments = TemplateArguments(
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        documents=fields.documents or None,
        extra=extra,
    )
    return None if arguments == TemplateArguments() else arguments


class ChatWriter(OpenAIWriter):
    """Writes chat completions, whole or as chunks with deltas."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    empty_choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}  # noqa: RUF012
    _names: TokenNames

    def __init__(self, model: str, fields: ChatFields, tier: str) -> None:
        super().__init__(model, fields)
        self._tier = tier
        self._num_answers = min(fields.n or 1, MAX_ANSWERS)  # not checked yet when the stream is opened early
        self._with_logprobs = bool(fields.logprobs)
        self._with_token_ids = bool(fields.return_token_ids)
        self._announced_calls: set[tuple[int, int]] = set()
        """(answer index, call index) of the tool calls whose id and name were already sent."""

    def prepare(self, fields: ChatFields, text: TextModel) -> None:
        self._names = TokenNames(text.tokenizer, bool(fields.return_tokens_as_token_ids))

    def begin(self, replies: Sequence[Reply]) -> bytes:
        """Return a chunk with the role for each answer."""
        head = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self.chunks(replies, [{"index": index, **head} for index in range(self._num_answers)])

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """Return a chunk for each piece."""
        choices: list[dict[str, Any]] = []
        for _, piece in batch:
            choices += self._announcement(piece)
            if piece.delta or piece.finish_reason or self._with_logprobs or self._with_token_ids:
                choices.append(self._choice(piece))
        return self.chunks(replies, choices)

    def whole(self, replies: Sequence[Reply]) -> bytes:
        """Return the complete response: all answers, the service tier, and the requested data about the prompt."""
        (reply,) = replies
        choices = [
            {
                "index": answer.index,
                "message": self._message(answer),
                "logprobs": self._logprobs(answer),
                **finish_fields(answer),
                **({"token_ids": list(answer.token_ids)} if self._with_token_ids else {}),
            }
            for answer in reply.completion().answers
        ]
        extra: dict[str, Any] = {"service_tier": self._tier, "system_fingerprint": None}
        if reply.request.params.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self._names)
        if self._with_token_ids:
            extra["prompt_token_ids"] = list(reply.request.prompt)
        return self.response(replies, choices, **extra)

    def _message(self, answer: Answer) -> dict[str, Any]:
        content = answer.text if answer.text or not answer.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if answer.tool_calls:
            message["tool_calls"] = [call_message(call) for call in answer.tool_calls]
        return message

    def _announcement(self, piece: Piece) -> list[dict[str, Any]]:
        """Return a choice with the id and name of a tool call, if the call begins with this piece; otherwise none."""
        part = piece.part
        if not isinstance(part, ToolCallPart) or (piece.index, part.call_index) in self._announced_calls:
            return []
        self._announced_calls.add((piece.index, part.call_index))
        function = {"name": part.name, "arguments": ""}
        head = {"index": part.call_index, "id": part.call_id, "type": "function", "function": function}
        delta = {"tool_calls": [head]}
        return [{"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            "delta": _delta(piece) if piece.delta or not piece.finish_reason else {},
            "logprobs": self._logprobs(piece),
            **finish_fields(piece),
        }
        if self._with_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _logprobs(self, output: Piece | Answer) -> dict[str, Any] | None:
        return chat_logprobs(output.logprobs, self._names) if self._with_logprobs else None


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.part:
        case ToolCallPart() as part:
            return {"tool_calls": [{"index": part.call_index, "function": {"arguments": piece.delta}}]}
        case ReasoningPart():
            return {"reasoning": piece.delta, "reasoning_content": piece.delta}
        case _:
            return {"content": piece.delta}
