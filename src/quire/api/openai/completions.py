"""`/v1/completions`: prompts as texts or token ids in, what follows them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.api.auth import Caller
from quire.api.limits import MAX_PROMPTS
from quire.api.models import Models
from quire.api.openai.chat import finish_word
from quire.api.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from quire.api.openai.meaning import (
    check_room,
    how,
    refuse_to_explain_nothing,
    refuse_what_is_not_built,
    sampling_params,
    stream_options,
)
from quire.api.openai.shapes import CompletionFields, Prompt, read
from quire.api.questions import Addressed, Question
from quire.api.refusals import invalid
from quire.core.step import TokenLogprobs
from quire.engine.answers import Piece
from quire.engine.reply import Reply
from quire.engine.text_model import TextModel

MAX_TOKENS_DEFAULT = 16


class Completions:
    """Makes questions out of completion bodies."""

    def parse(self, body: dict[str, Any]) -> CompletionFields:
        """Valid fields, or a refusal."""
        fields: CompletionFields = read(CompletionFields, body)
        refuse_what_is_not_built(body)
        if not 0 < len(fields.prompts) <= MAX_PROMPTS or not all(len(one) for one in fields.prompts):
            raise invalid(f"prompt must hold 1 to {MAX_PROMPTS} prompts, none of them empty", "prompt")
        if fields.best_of not in (None, fields.n or 1):
            raise invalid(f"best_of must be equal to n, {fields.best_of} given; leave it out", "best_of")
        return fields

    def addressed(
        self, fields: CompletionFields, models: Models, caller: Caller, headers: Mapping[bytes, bytes]
    ) -> Addressed:
        """Whom it asks, and in whose name."""
        return Addressed(models.named(fields.model), how(fields, caller, headers))

    def question(self, fields: CompletionFields, to: Addressed) -> Question:
        """What it asks, in tokens."""
        front = to.model.open()
        limit = MAX_TOKENS_DEFAULT if fields.max_tokens is None else fields.max_tokens
        # A prompt's own log-probabilities are asked for with an answer of none: one token is computed, and not shown.
        is_scored = limit == 0 and bool(fields.echo)
        settled: dict[str, Any] = {"max_tokens": 1 if is_scored else limit, "logprobs": fields.logprobs}
        if fields.echo and fields.logprobs is not None and fields.prompt_logprobs is None:
            settled["prompt_logprobs"] = fields.logprobs
        params = sampling_params(fields, **settled)
        refuse_to_explain_nothing(fields, params)
        add = fields.add_special_tokens is not False
        prompts = [_ids(front.text, prompt, add_special_tokens=add) for prompt in fields.prompts]
        for ids in prompts:
            check_room(to.model, len(ids), params.max_tokens)
        names = TokenNames(front.text.tokenizer, bool(fields.return_tokens_as_token_ids))
        echoes = [_text(one, names) for one in fields.prompts] if fields.echo else None
        wording = CompletionWording(names, fields, echoes, shows_answers=not is_scored)
        return Question(to, prompts, params, stream_options(fields), wording, shows_answers=not is_scored)


def _ids(text: TextModel, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
    if add_special_tokens or not isinstance(prompt, str):
        return text.prompt(prompt)
    return text.prompt(text.tokenizer.encode(prompt, add_special_tokens=False))


def _text(prompt: str | list[int], names: TokenNames) -> str:
    return prompt if isinstance(prompt, str) else names.tokenizer.decode(prompt)


@dataclass
class CompletionWording:
    """How completions are worded. Remembers how long each text is, because offsets are counted from its start."""

    names: TokenNames
    fields: CompletionFields
    echoes: Sequence[str] | None
    shows_answers: bool
    id_prefix: str = "cmpl"
    object_name: str = "text_completion"
    chunk_name: str = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, place: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """The prompt itself, if it is to be echoed."""
        if self.echoes is None:
            return ()
        choices = []
        for one in reply.request.continuations:
            index = self._index(place, one.index)
            logprobs = self._logprobs(index, _prompt_entries(reply))
            choices.append(self._told(index, self.echoes[place], logprobs, None))
        return choices

    def choice(self, place: int, piece: Piece) -> dict[str, Any] | None:
        """What was added."""
        wants_tokens = self.fields.logprobs is not None or self.fields.return_token_ids
        if not piece.text and not piece.finish_reason and not wants_tokens:
            return None
        index = self._index(place, piece.index)
        shown = piece.logprobs if self.shows_answers else ()
        text = piece.text if self.shows_answers else ""
        return self._told(index, text, self._logprobs(index, shown), piece)

    def whole(self, place: int, reply: Reply) -> Sequence[dict[str, Any]]:
        """All answers to one prompt."""
        return [self._whole(place, reply, answer) for answer in reply.completion().answers]

    def extras(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        """Nothing else."""
        return {"system_fingerprint": None}

    def _whole(self, place: int, reply: Reply, answer: Any) -> dict[str, Any]:
        echo = self.echoes[place] if self.echoes is not None else ""
        entries = _prompt_entries(reply) if self.echoes is not None else []
        if self.shows_answers:
            entries = [*entries, *answer.logprobs]
        index = self._index(place, answer.index)
        text = echo + (answer.text if self.shows_answers else "")
        told = self._told(index, text, self._logprobs(index, entries), answer)
        if self.fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(reply.prompt_logprobs, self.names)
        if self.fields.return_token_ids:
            told["prompt_token_ids"] = list(reply.request.prompt)
        return told

    def _told(self, index: int, text: str, logprobs: dict[str, Any] | None, said: Any) -> dict[str, Any]:
        reason = said.finish_reason if said is not None else None
        told = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_word(reason)}
        if reason:
            told["stop_reason"] = said.stop_reason
        if self.fields.return_token_ids and said is not None:
            told["token_ids"] = list(said.token_ids) if self.shows_answers else []
        return told

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs | int]) -> dict[str, Any] | None:
        if self.fields.logprobs is None:
            return None
        told, self._offsets[index] = completion_logprobs(entries, self.names, self._offsets.get(index, 0))
        return told

    def _index(self, place: int, index: int) -> int:
        return place * (self.fields.n or 1) + index


def _prompt_entries(reply: Reply) -> list[TokenLogprobs | int]:
    """The prompt's tokens; the first has no log-probability, and without any having been asked for, none has."""
    prompt, known = reply.request.prompt, reply.prompt_logprobs
    return [prompt[0], *known] if known else list(prompt)
