"""A model without its tensors, as the parent process uses it: tokenizer, template, EOS tokens, sampling defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from quire.checkpoints import Checkpoint
from quire.config.model_settings import ToolFormatName
from quire.core.digests import Namespace
from quire.engine.engine import ModelInfo
from quire.errors import CheckpointError, InvalidParameterError, InvariantError, RequestTooLargeError, TemplateError
from quire.text.chat.answer_formats import NO_FORMATS, FormatFinder, ModelFormats
from quire.text.chat.control_tokens import ChatTokenizer
from quire.text.chat.prompt_parts import PromptParts
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.chat.rendering.template import TemplateArguments as TemplateArguments  # noqa: PLC0414 - re-exported for the API
from quire.text.grammars.checker import GrammarChecker
from quire.text.grammars.grammar import Grammar
from quire.text.sandboxed.messages import Rendered
from quire.text.text_work import timed_work
from quire.text.tokenizer import Tokenizer as Tokenizer  # noqa: PLC0414

MAX_BYTES_PER_TOKEN = 8
"""A prompt with more UTF-8 bytes than this times `max_sequence_tokens` is rejected without tokenization. Text of any
language has fewer bytes per token; only text that is mostly white space has more."""
MAX_NAMESPACES = 1024
"""Maximum number of cached `Namespace` objects, each of 6 short values."""
MAX_CONVERSATION_FACTOR = 4
"""A conversation may have this many times the maximum bytes of a prompt, because templates omit earlier reasoning."""

SIMPLE_ROLES = frozenset({"user", "assistant"})
Messages = Sequence[Mapping[str, Any]]


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Read the tokenizer of a checkpoint. It does not have the engine's limits yet, so it can be read while the engine
    loads. Raises CheckpointError if the checkpoint has no tokenizer.json."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer.json; quire needs this file to process text")
    return Tokenizer.from_files(checkpoint.tokenizer_file, MAX_BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class TextModel:
    """Converts prompts and conversations to token ids and checks them against the model's limits."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    defaults: Mapping[str, float | int]
    grammars: GrammarChecker | None = None
    """None: grammars are checked by the engine in this process, where a slow check delays no other client."""
    writes_tools: bool = False
    """Whether quire describes tools in the system text if the template does not support tools."""
    chat_tokenizer: ChatTokenizer | None = field(init=False, repr=False)
    format_finder: FormatFinder | None = field(init=False, repr=False, compare=False)
    has_reasoning: dict[str, bool] = field(init=False, repr=False, compare=False)
    """Model name -> whether the model writes reasoning. Filled on first use."""
    vocabulary_size: int = field(init=False)
    """Number of embedding rows; valid token ids are below it."""
    max_sequence_tokens: int = field(init=False)
    """Maximum number of tokens of a prompt and its answer together."""
    namespace: Callable[[str, str], Namespace] = field(init=False, repr=False, compare=False)
    """Returns the namespace of a cache group and an adapter. An LRU cache, because clients choose the names."""

    def __post_init__(self) -> None:
        """Compute the derived fields once, because the template's text must be searched for control tokens."""
        encoder = None if self.template is None else ChatTokenizer(self.tokenizer, self.template.text)
        object.__setattr__(self, "chat_tokenizer", encoder)
        finder = None if self.template is None else FormatFinder(self.template, self.tokenizer, self.eos_token_ids)
        object.__setattr__(self, "format_finder", finder)
        object.__setattr__(self, "has_reasoning", {})
        object.__setattr__(self, "namespace", lru_cache(MAX_NAMESPACES)(self.info.namespace))
        object.__setattr__(self, "vocabulary_size", self.info.vocabulary_size)
        object.__setattr__(self, "max_sequence_tokens", self.info.max_sequence_tokens)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        info: ModelInfo,
        tokenizer: Tokenizer,
        grammars: GrammarChecker | None = None,
        *,
        tool_format: ToolFormatName = "auto",
        sampling: Mapping[str, float] | None = None,
    ) -> "TextModel":
        """Build the text model of a checkpoint that an engine has loaded; its limits are applied to the tokenizer.
        `sampling` overrides the sampling defaults in the model's files."""
        max_bytes = MAX_BYTES_PER_TOKEN * info.max_sequence_tokens
        template = checkpoint.chat_template
        return cls(
            name=checkpoint.name,
            info=info,
            tokenizer=tokenizer.limited(max_bytes, info.max_sequence_tokens),
            template=None if template is None else ChatTemplate(template, checkpoint.special_tokens),
            eos_token_ids=checkpoint.end_tokens(tokenizer.library.token_to_id),
            defaults={**checkpoint.generation_defaults, **(sampling or {})},
            grammars=grammars,
            writes_tools=tool_format == "hermes",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the operator about the model, and about a template whose rendering was stopped."""
        failure = None if self.template is None else self.template.failure
        return self.info.notes if failure is None else (*self.info.notes, str(failure))

    def prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt. It may be a text, or a list of token ids, which are validated."""
        if isinstance(prompt, str):
            with timed_work("tokenize"):
                return self._check_ids(self.tokenizer.encode(prompt, add_special_tokens=True))
        if not isinstance(prompt, Sequence):
            raise InvalidParameterError(f"expected a prompt as text or as a list of token ids, got {prompt!r}")
        if len(prompt) > self.max_sequence_tokens:  # first, because checking each id of a long list is slow
            limit = f"expected at most {self.max_sequence_tokens} tokens in a prompt and its answer"
            message = f"{limit}, got {len(prompt)} in the prompt alone; shorten the prompt"
            raise RequestTooLargeError(message, code="too_many_token_ids")
        return self._check_ids(self._check_integers([*prompt]))

    def chat(self, messages: Messages, arguments: TemplateArguments | None = None) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's template."""
        return self.chat_parts(messages, arguments)[0]

    def chat_parts(
        self, messages: Messages, arguments: TemplateArguments | None = None
    ) -> tuple[list[int], PromptParts]:
        """Return the token ids of a conversation, and the token range of each message."""
        return self.encoded_parts(self.rendered(messages, arguments), messages)

    def rendered(self, messages: Messages, arguments: TemplateArguments | None = None) -> Rendered:
        """Render a conversation with the model's template. Raises TemplateError if the model has none."""
        if self.template is None:
            hint = "use the completions endpoint with a plain prompt, or a chat model"
            message = f"expected a model with a chat template, this model has none; {hint}"
            raise TemplateError(message, code="template_missing")
        self._check_size(messages, arguments)
        return self.template.render(messages, arguments)

    def encoded_parts(
        self, rendered: Rendered, messages: Messages, tools: Sequence[str] = ()
    ) -> tuple[list[int], PromptParts]:
        """Return the token ids of rendered text, and the token ranges of the messages and of the named tools. Text
        from a client never becomes a control token."""
        if self.chat_tokenizer is None:
            raise InvariantError("a text was rendered without a template")
        with timed_work("tokenize"):
            ids, parts = self.chat_tokenizer.encode_parts(rendered, messages, tools)
        return self._check_ids(ids), parts

    def is_simple(self, messages: Messages) -> bool:
        """Return whether the answer is plain text and all templates have all roles, so that formats are not needed."""
        if self.name not in self.has_reasoning:
            self.has_reasoning[self.name] = self.formats().reasoning is not None
        if self.has_reasoning[self.name]:
            return False
        roles = [message.get("role") for message in messages]
        has_calls = any("tool_calls" in message for message in messages)
        return not has_calls and set(roles[1:]) <= SIMPLE_ROLES and roles[0] in {*SIMPLE_ROLES, "system"}

    def formats(self) -> ModelFormats:
        """Return the formats in which the model writes reasoning and tool calls."""
        return NO_FORMATS if self.format_finder is None else self.format_finder.find()

    def validate_grammar(self, grammar: Grammar) -> str:
        """Return a grammar's text for the engine. Raises InvalidParameterError if the grammar cannot be compiled."""
        if self.grammars is not None:
            self.grammars.check(grammar)
        return grammar.text

    def close(self) -> None:
        """Stop the processes that render templates and check grammars."""
        if self.template is not None:
            self.template.close()
        if self.grammars is not None:
            self.grammars.close()

    def _check_size(self, messages: Messages, arguments: TemplateArguments | None) -> None:
        """Raise RequestTooLargeError for a conversation that could not fit, before it is rendered."""
        limit = MAX_CONVERSATION_FACTOR * self.tokenizer.max_bytes
        size = num_text_bytes(list(messages))
        if arguments is not None:
            size += num_text_bytes([arguments.tools, arguments.documents, arguments.extra])
        if size > limit:
            message = f"expected at most {limit} bytes of text in a conversation, got {size}"
            raise RequestTooLargeError(f"{message}; shorten it, or send fewer messages", code="conversation_too_long")

    def _check_integers(self, ids: list[Any]) -> list[int]:
        """Return the ids if all are integers; otherwise raise InvalidParameterError."""
        if set(map(type, ids)) - {int}:
            unexpected = next(token_id for token_id in ids if type(token_id) is not int)
            raise self._invalid_id_error(unexpected)
        return ids

    def _check_ids(self, ids: list[int]) -> list[int]:
        """Return the ids if the model has an embedding row for each. A tokenizer may have more tokens than rows."""
        if not ids:
            message = "expected at least one token in the prompt, got none; send some text"
            raise RequestTooLargeError(message, code="empty_prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            raise self._invalid_id_error(min(ids) if min(ids) < 0 else max(ids))
        return ids

    def _invalid_id_error(self, value: object) -> InvalidParameterError:
        message = f"expected prompt tokens to be integers from 0 to {self.vocabulary_size - 1}, got {value!r}"
        return InvalidParameterError(message, code="invalid_token_ids")


def num_text_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all strings in nested lists and mappings, keys included."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return sum(map(num_text_bytes, value)) + sum(map(num_text_bytes, value.values()))
    return sum(map(num_text_bytes, value)) if isinstance(value, list | tuple) else 0
