"""`/v1/completions`: continue prompts, which are texts or token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.api.dialects.answering import Dialect
from quire.api.dialects.openai.fields import (
    COMPLETION_NAMES,
    NOT_FOR_COMPLETIONS,
    check_bounds,
    reject_unsupported,
    sampling_params,
)
from quire.api.dialects.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from quire.api.dialects.openai.schemas import CompletionFields, PromptField, parse_fields
from quire.api.dialects.openai.writer import OpenAIWriter, finish_fields
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.dialects.response_writer import PieceBatch
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_PROMPTS
from quire.client.reply.outputs import Answer, Piece, TextPart
from quire.client.reply.reply import Reply
from quire.client.request.text_model import TextModel
from quire.core.step import TokenLogprobs

MAX_TOKENS_DEFAULT = 16


class Completions(Dialect):
    """The dialect of `/v1/completions`."""

    names = COMPLETION_NAMES

    def parse(self, body: dict[str, Any]) -> CompletionFields:
        fields: CompletionFields = parse_fields(CompletionFields, body)
        reject_unsupported(body, NOT_FOR_COMPLETIONS)
        if not 0 < len(fields.prompts) <= MAX_PROMPTS or not all(len(prompt) for prompt in fields.prompts):
            raise invalid(f"expected 1 to {MAX_PROMPTS} prompts, none of them empty", "prompt")
        if fields.best_of not in (None, fields.n or 1):
            raise invalid(f"expected best_of equal to n, got {fields.best_of}; leave it out", "best_of")
        return fields

    def render(self, fields: CompletionFields, request: ResolvedRequest, text: TextModel) -> ResolvedRequest:
        limit = MAX_TOKENS_DEFAULT if fields.max_tokens is None else fields.max_tokens
        computed: dict[str, Any] = {"max_tokens": limit, "logprobs": fields.logprobs}
        # max_tokens 0 requests only the prompt's log-probabilities; nothing is generated.
        if fields.echo and fields.prompt_logprobs is None and (fields.logprobs is not None or limit == 0):
            computed["prompt_logprobs"] = fields.logprobs or 0
        params = sampling_params(fields, **computed)
        adds_special = fields.add_special_tokens is not False
        prompts = [_ids(text, prompt, add_special_tokens=adds_special) for prompt in fields.prompts]
        request = replace(request, prompts=prompts, params=params)
        num_copies = bool(fields.echo and fields.logprobs is not None) + (fields.prompt_logprobs is not None)
        check_bounds(request, text.max_sequence_tokens, num_prompt_times=params.n * num_copies)
        return request

    def writer(self, fields: CompletionFields, request: ResolvedRequest) -> "CompletionWriter":
        return CompletionWriter(request.model.name, fields)


def _ids(text: TextModel, prompt: PromptField, *, add_special_tokens: bool) -> list[int]:
    if add_special_tokens or not isinstance(prompt, str):
        return text.prompt(prompt)
    return text.prompt(text.tokenizer.encode(prompt, add_special_tokens=False))


def _text(prompt: str | list[int], names: TokenNames) -> str:
    return prompt if isinstance(prompt, str) else names.tokenizer.decode(prompt)


@dataclass(frozen=True, slots=True)
class _PromptFields:
    """The parts of a response choice that are the same for all answers to a prompt."""

    text: str
    logprobs: dict[str, list[Any]] | None
    num_chars: int
    """Number of characters of the tokens in `logprobs`."""
    extra: dict[str, Any]


class CompletionWriter(OpenAIWriter):
    """Writes completions, whole or as chunks. `_offsets` has the length of each answer's text so far: text_offset
    counts from the start of the text."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"
    empty_choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}  # noqa: RUF012
    names: TokenNames

    def __init__(self, model: str, fields: CompletionFields) -> None:
        super().__init__(model, fields)
        self.fields = fields
        self.echoes: Sequence[str] | None = None
        """The prompts as texts, if the client requested an echo."""
        self._prompts_with_output: set[int] = set()
        """Indices of the prompts for which output was already sent."""
        self._offsets: dict[int, int] = {}

    def prepare(self, fields: CompletionFields, text: TextModel) -> None:
        self.names = TokenNames(text.tokenizer, bool(fields.return_tokens_as_token_ids))
        if fields.echo:
            self.echoes = [_text(prompt, self.names) for prompt in fields.prompts]

    def pieces(self, replies: Sequence[Reply], batch: PieceBatch) -> bytes:
        """Return a chunk for each piece. With echo, the prompt precedes the first piece of its answers."""
        choices: list[dict[str, Any]] = []
        shows_all = self.fields.logprobs is not None or self.fields.return_token_ids
        for prompt_index, piece in batch:
            if prompt_index not in self._prompts_with_output:
                self._prompts_with_output.add(prompt_index)
                choices += self._echo(prompt_index, replies[prompt_index])
            if piece.delta or piece.finish_reason or shows_all:
                choices.append(self._choice(prompt_index, piece))
        return self.chunks(replies, choices)

    def whole(self, replies: Sequence[Reply]) -> bytes:
        choices = [choice for index, reply in enumerate(replies) for choice in self._choices(index, reply)]
        return self.response(replies, choices, system_fingerprint=None)

    def _echo(self, prompt_index: int, reply: Reply) -> list[dict[str, Any]]:
        if self.echoes is None:
            return []
        logprobs, offset = self._logprobs(_prompt_entries(reply), 0)
        indices = [self._index(prompt_index, part.index) for part in reply.request.continuations]
        self._offsets |= dict.fromkeys(indices, offset)
        return [self._object(index, self.echoes[prompt_index], logprobs, None) for index in indices]

    def _choice(self, prompt_index: int, piece: Piece) -> dict[str, Any]:
        index = self._index(prompt_index, piece.index)
        text = piece.delta if isinstance(piece.part, TextPart) else ""
        logprobs, self._offsets[index] = self._logprobs(piece.logprobs, self._offsets.get(index, 0))
        return self._object(index, text, logprobs, piece)

    def _choices(self, prompt_index: int, reply: Reply) -> list[dict[str, Any]]:
        prompt = self._prompt_fields(prompt_index, reply)
        return [
            self._complete_choice(self._index(prompt_index, answer.index), prompt, answer)
            for answer in reply.completion().answers
        ]

    def _prompt_fields(self, prompt_index: int, reply: Reply) -> "_PromptFields":
        """Return what all answers to a prompt have in common; called once per prompt."""
        logprobs, offset = self._logprobs(_prompt_entries(reply) if self.echoes is not None else (), 0)
        extra: dict[str, Any] = {}
        if self.fields.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self.names)
        if self.fields.return_token_ids:
            extra["prompt_token_ids"] = reply.request.prompt
        return _PromptFields(self.echoes[prompt_index] if self.echoes is not None else "", logprobs, offset, extra)

    def _complete_choice(self, index: int, prompt: "_PromptFields", answer: Answer) -> dict[str, Any]:
        logprobs = prompt.logprobs
        if logprobs is not None:
            added, _ = completion_logprobs(answer.logprobs, self.names, prompt.num_chars)
            logprobs = {name: logprobs[name] + added[name] for name in added}
        return self._object(index, prompt.text + answer.text, logprobs, answer) | prompt.extra

    def _object(self, index: int, text: str, logprobs: dict[str, Any] | None, output: Any) -> dict[str, Any]:
        end = {"finish_reason": None} if output is None else finish_fields(output)
        choice = {"index": index, "text": text, "logprobs": logprobs, **end}
        if self.fields.return_token_ids and output is not None:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprobs | int], offset: int) -> tuple[dict[str, list[Any]] | None, int]:
        if self.fields.logprobs is None:
            return None, offset
        return completion_logprobs(entries, self.names, offset)

    def _index(self, prompt_index: int, index: int) -> int:
        return prompt_index * (self.fields.n or 1) + index


def _prompt_entries(reply: Reply) -> list[TokenLogprobs | int]:
    """Return the prompt's tokens with log-probabilities; the first, or all if none were requested, as bare ids."""
    prompt, entries = reply.request.prompt, reply.prompt_logprobs
    return [prompt[0], *entries] if entries else list(prompt)
