"""A model as the parent process sees it: its words, its template, its ends, its own sampling settings. No tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from quire.checkpoints import Checkpoint
from quire.core.digests import Namespace
from quire.core.request import SamplingParams as CoreParams
from quire.engine.chat_template import ChatTemplate, TemplateArguments, require_template
from quire.engine.parameters import SamplingParams
from quire.engine.text import Tokenizer
from quire.errors import CheckpointError, InvalidParameterError, RequestTooLargeError

MAX_CHARS_PER_TOKEN = 64
"""A prompt of more characters than this times the longest sequence is not tokenised at all: tokens of rules and spaces
reach this length, words do not."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TextModel:
    """What turns words into requests."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    defaults: Mapping[str, float | int]
    vocabulary_size: int
    max_sequence_tokens: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, vocabulary_size: int, max_sequence_tokens: int) -> "TextModel":
        """The text side of a checkpoint."""
        if checkpoint.tokenizer_file is None:
            raise CheckpointError(f"{checkpoint.name} has no tokenizer.json; quire needs one to read and write text")
        max_chars = MAX_CHARS_PER_TOKEN * max_sequence_tokens
        template = checkpoint.chat_template
        return cls(
            name=checkpoint.name,
            tokenizer=Tokenizer.from_files(checkpoint.tokenizer_file, max_chars),
            template=None if template is None else ChatTemplate(template, checkpoint.special_tokens),
            eos_token_ids=checkpoint.eos_token_ids,
            defaults=checkpoint.generation_defaults,
            vocabulary_size=vocabulary_size,
            max_sequence_tokens=max_sequence_tokens,
        )

    def prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt given as text or as ids already."""
        if isinstance(prompt, str):
            return self._checked(self.tokenizer.encode(prompt, add_special_tokens=True))
        if not isinstance(prompt, Sequence):
            raise InvalidParameterError(f"a prompt must be a text or a list of token ids, {prompt!r} given")
        if len(prompt) > self.max_sequence_tokens:  # before each of a million numbers is looked at
            raise RequestTooLargeError(
                f"a prompt and its answer may have {self.max_sequence_tokens} tokens together, the prompt alone has "
                f"{len(prompt)}; shorten it"
            )
        return self._checked([*prompt])

    def chat(self, messages: Messages, **arguments: Unpack[TemplateArguments]) -> list[int]:
        """Token ids of a conversation, by the model's own template."""
        strange = sorted(set(arguments) - TemplateArguments.__annotations__.keys())
        if strange:
            raise InvalidParameterError(
                f"a template may be told {', '.join(TemplateArguments.__annotations__)}; {strange[0]!r} given"
            )
        text = require_template(self.template).render(messages, **arguments)
        return self._checked(self.tokenizer.encode(text, add_special_tokens=False))

    def _checked(self, ids: list[int]) -> list[int]:
        """A tokenizer may know more tokens than the model has rows, and a caller may say anything."""
        if not ids:
            raise RequestTooLargeError("a prompt must have at least one token, none given; say something")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocabulary_size:
                raise InvalidParameterError(
                    f"a prompt's tokens must be whole numbers from 0 to {self.vocabulary_size - 1}, {token_id!r} given"
                )
        return ids

    def settle(self, params: SamplingParams, num_prompt_tokens: int) -> CoreParams:
        """The core's parameters for a prompt of this length."""
        settled = params.settle(self.defaults, self.eos_token_ids, self.vocabulary_size)
        room = self.max_sequence_tokens - num_prompt_tokens
        return settled if params.max_tokens is not None or room < 1 else replace(settled, max_tokens=room)


@dataclass(frozen=True, slots=True)
class ModelFace:
    """A model as those see it who ask it, wherever it runs."""

    text: TextModel
    namespace: Callable[[str], Namespace]
    """Where a cache group's blocks are named."""
    line: str
    """How much fits in how much memory."""
    notes: tuple[str, ...] = ()
