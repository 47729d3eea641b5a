"""A model as the parent process sees it: tokenizer, template, end tokens, its own sampling settings. No tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.checkpoints import Checkpoint
from quire.client.request.params import SamplingParams
from quire.config.model_settings import ToolFormatName
from quire.core.digests import Namespace
from quire.core.request import ResolvedSampling as CoreParams
from quire.core.work_budget import WorkKind
from quire.engine.engine import ModelInfo
from quire.errors import CheckpointError, InvalidParameterError, InvariantError, RequestTooLargeError, TemplateError
from quire.text.chat.answer_formats import NO_FORMATS, FormatFinder, ModelFormats
from quire.text.chat.control_tokens import ChatTokenizer
from quire.text.chat.prompt_parts import PromptParts, TemplateParts, message_parts
from quire.text.chat.rendering.messages import num_text_bytes
from quire.text.chat.rendering.template import NO_ARGUMENTS as NO_ARGUMENTS  # noqa: PLC0414 - for the API, too
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.chat.rendering.template import TemplateArguments as TemplateArguments  # noqa: PLC0414
from quire.text.grammars.checker import GrammarChecker
from quire.text.grammars.grammar import Grammar
from quire.text.sandboxed.template_messages import Rendered
from quire.text.text_work import timed_work
from quire.text.tokenizer import Tokenizer as Tokenizer  # noqa: PLC0414

MAX_BYTES_PER_TOKEN = 8
"""A prompt of more bytes in UTF-8 than this times the longest sequence is not tokenised at all. Words of any language
have fewer; what has more is mostly white space."""
MAX_NAMESPACES = 1024
"""Kept at once; a request's own is 6 short values."""
MAX_UNRENDERED = 4
"""So many times a prompt's bytes may a conversation have before it is rendered: templates leave out old thoughts."""

SIMPLE_ROLES = frozenset({"user", "assistant"})
Messages = Sequence[Mapping[str, Any]]


class Namespaces(dict[tuple[str, str], Namespace]):
    """Of one model's blocks: made at their first use, and kept as long as there are not too many: clients name some."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        self._info = info

    def __missing__(self, key: tuple[str, str]) -> Namespace:
        if len(self) >= MAX_NAMESPACES:
            self.clear()
        cache_group, adapter = key
        found = self[key] = self._info.namespace(cache_group, adapter)
        return found


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, limited by no engine yet: it can be read while that loads."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer.json; quire needs one to read and write text")
    return Tokenizer.from_files(checkpoint.tokenizer_file, MAX_BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class TextModel:
    """What turns text into requests."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    defaults: Mapping[str, float | int]
    grammars: GrammarChecker | None = None
    """None: the engine in this process checks grammars itself, and no other client waits for that."""
    writes_tools: bool = False
    """Where its template has no tools, they are described in a text of ours."""
    chat_tokenizer: ChatTokenizer | None = field(init=False, repr=False)
    format_finder: FormatFinder | None = field(init=False, repr=False, compare=False)
    has_thoughts: dict[str, bool] = field(init=False, repr=False, compare=False)
    """Whether it writes any, by its name, once that is found out."""
    vocabulary_size: int = field(init=False)
    """Tokens the model has rows for."""
    max_sequence_tokens: int = field(init=False)
    """The longest prompt and answer together."""
    namespaces: "Namespaces" = field(init=False, repr=False, compare=False)
    """By cache group and adapter."""

    def __post_init__(self) -> None:
        """Decide once which tokens control the model, by the template's own text."""
        encoder = None if self.template is None else ChatTokenizer(self.tokenizer, self.template.own_text)
        object.__setattr__(self, "chat_tokenizer", encoder)
        finder = None if self.template is None else FormatFinder(self.template, self.tokenizer, self.eos_token_ids)
        object.__setattr__(self, "format_finder", finder)
        object.__setattr__(self, "has_thoughts", {})
        object.__setattr__(self, "namespaces", Namespaces(self.info))
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
        """The text side of a checkpoint that an engine has loaded; the tokenizer gets that engine's limits. `sampling`
        comes before the settings in the model's files."""
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
        """Notes for the operator about the model, and about a template that had to be stopped."""
        failure = None if self.template is None else self.template.failure
        return self.info.notes if failure is None else (*self.info.notes, str(failure))

    def prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt given as text or as ids already."""
        if isinstance(prompt, str):
            with timed_work(WorkKind.TOKENIZE):
                return self._within_rows(self.tokenizer.encode(prompt, add_special_tokens=True))
        if not isinstance(prompt, Sequence):
            raise InvalidParameterError(f"expected a prompt as text or as a list of token ids, got {prompt!r}")
        if len(prompt) > self.max_sequence_tokens:  # before each of a million numbers is checked
            rule = f"expected at most {self.max_sequence_tokens} tokens in a prompt and its answer"
            sentence = f"{rule}, the prompt alone has {len(prompt)}; shorten it"
            raise RequestTooLargeError(sentence, code="too_many_token_ids")
        return self._within_rows(self._whole_numbers([*prompt]))

    def chat(self, messages: Messages, arguments: TemplateArguments = NO_ARGUMENTS) -> list[int]:
        """Token ids of a conversation, by the model's own template."""
        return self.chat_parts(messages, arguments)[0]

    def chat_parts(
        self, messages: Messages, arguments: TemplateArguments = NO_ARGUMENTS
    ) -> tuple[list[int], PromptParts]:
        """The same, and where its messages lie among them."""
        rendered = self.rendered(messages, arguments)
        return self.encoded_parts(rendered, TemplateParts(message_parts(messages)))

    def rendered(self, messages: Messages, arguments: TemplateArguments = NO_ARGUMENTS) -> Rendered:
        """A conversation as the model's own template writes it."""
        if self.template is None:
            way_out = "use the completions endpoint with a plain prompt, or a chat model"
            missing = f"expected a model with a chat template, this model has none; {way_out}"
            raise TemplateError(missing, code="template_missing")
        self._check_size(messages, arguments)
        return self.template.render(messages, arguments)

    def encoded_parts(self, rendered: Rendered, table: TemplateParts) -> tuple[list[int], PromptParts]:
        """Token ids of what was rendered, and where the parts of `table` lie among them. No text of a client's becomes
        a control token."""
        if self.chat_tokenizer is None:
            raise InvariantError("a text was rendered without a template")
        with timed_work(WorkKind.TOKENIZE):
            ids, parts = self.chat_tokenizer.encode_parts(rendered, table)
        return self._within_rows(ids), parts

    def is_simple(self, messages: Messages) -> bool:
        """A chat whose answer is all text, in roles that every template has: there is nothing to find out for it."""
        if self.name not in self.has_thoughts:
            self.has_thoughts[self.name] = self.formats().reasoning is not None
        if self.has_thoughts[self.name]:
            return False
        roles = [message.get("role") for message in messages]
        has_calls = any("tool_calls" in message for message in messages)
        return not has_calls and set(roles[1:]) <= SIMPLE_ROLES and roles[0] in {*SIMPLE_ROLES, "system"}

    def formats(self) -> ModelFormats:
        """How it writes thoughts and calls."""
        return NO_FORMATS if self.format_finder is None else self.format_finder.find()

    def checked(self, grammar: Grammar) -> str:
        """A grammar as an engine takes it. Raises InvalidParameterError if none could follow it."""
        if self.grammars is not None:
            self.grammars.check(grammar)
        return grammar.text

    def close(self) -> None:
        """End what renders its chats and checks its grammars."""
        if self.template is not None:
            self.template.close()
        if self.grammars is not None:
            self.grammars.close()

    def _check_size(self, messages: Messages, arguments: TemplateArguments) -> None:
        """What could not fit is not rendered."""
        limit = MAX_UNRENDERED * self.tokenizer.max_bytes
        size = num_text_bytes([list(messages), arguments.tools, arguments.documents, arguments.extra])
        if size > limit:
            rule = f"expected at most {limit} bytes of text in a conversation, got {size}"
            raise RequestTooLargeError(f"{rule}; shorten it, or send fewer messages", code="conversation_too_long")

    def _whole_numbers(self, ids: list[Any]) -> list[int]:
        """A caller may pass anything."""
        if set(map(type, ids)) - {int}:
            unexpected = next(one for one in ids if type(one) is not int)
            raise self._not_a_row(unexpected)
        return ids

    def _within_rows(self, ids: list[int]) -> list[int]:
        """A tokenizer may have more tokens than the model has rows."""
        if not ids:
            missing = "expected at least one token in the prompt, got none; send some text"
            raise RequestTooLargeError(missing, code="empty_prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            raise self._not_a_row(min(ids) if min(ids) < 0 else max(ids))
        return ids

    def _not_a_row(self, value: object) -> InvalidParameterError:
        rule = f"expected prompt tokens to be integers from 0 to {self.vocabulary_size - 1}, got {value!r}"
        return InvalidParameterError(rule, code="invalid_token_ids")

    def settle(self, params: SamplingParams, num_prompt_tokens: int) -> CoreParams:
        """The core's parameters for a prompt of this length."""
        room = max(1, self.max_sequence_tokens - num_prompt_tokens)
        return params.settle(self.defaults, self.eos_token_ids, self.vocabulary_size, room)
