"""Messages between a server and its helper processes.

    to a template process     LoadTemplate · Render
    from it                   TemplateLoaded · TemplateFailed · Rendered · TemplateRefused
    to a grammar checker      LoadVocabulary · CheckGrammar
    from it                   VocabularyLoaded · VocabularyRefused · GrammarFine · GrammarRefused

Messages are plain data: the server sends texts of clients, and a helper returns one prompt or one verdict.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import TemplateError

TOO_DEEP = (
    "messages or tools are nested too deep for a chat template: expected at most some hundred lists and objects inside "
    "one another; send arguments and schemas with fewer levels"
)
"""Error for messages nested so deeply that they cannot be serialized, or that a template cannot process them."""


class LoadTemplate(msgspec.Struct, frozen=True, tag=True):
    """Compile this template, and render test messages to find its properties."""

    source: str
    special_tokens: dict[str, str]
    max_output_chars: int
    max_steps: int


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render the loaded template."""

    messages: list[dict[str, Any]]
    tools: Any
    documents: Any
    extra: dict[str, Any]
    add_generation_prompt: bool
    now: str
    """The current time for the template, in ISO 8601."""


class TemplateLoaded(msgspec.Struct, frozen=True, tag=True):
    """The template can be used."""

    wants_parts: bool
    """Whether the template shows a message's text only if the content is a list of parts."""
    own_text: str
    """All text literals of the template."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A prompt, and the spans of it that a client wrote."""

    text: str
    client_spans: tuple[tuple[int, int], ...] = msgspec.field(name="client")
    """Spans (start, stop) of the client's characters, in order."""
    labeled_spans: tuple[tuple[int, int, str], ...] = msgspec.field(default=(), name="sources")
    """Spans (start, stop, label), in order; a label is `m` and a message's index, or `t` and a tool's index."""
    spent_s: float = 0.0
    """CPU time."""


class TemplateRefused(msgspec.Struct, frozen=True, tag=True):
    """The template rejected the messages, or exceeded a limit on them."""

    message: str
    spent_s: float = 0.0
    code: str = TemplateError.code


class TemplateFailed(msgspec.Struct, frozen=True, tag="Broken"):
    """The template does not compile."""

    message: str


ToProcess = LoadTemplate | Render
ToServer = TemplateLoaded | Rendered | TemplateRefused | TemplateFailed

read_to_process: Callable[[bytes], ToProcess] = msgspec.json.Decoder(ToProcess).decode
read_to_server: Callable[[bytes], ToServer] = msgspec.json.Decoder(ToServer).decode


# -- grammars ----------------------------------------------------------------------------------------------------------


class LoadVocabulary(msgspec.Struct, frozen=True, tag=True):
    """Load the vocabulary of a model."""

    tokenizer_json: str
    vocabulary_size: int
    end_tokens: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile this grammar, compute its first mask, and try some tokens."""

    grammar: str
    cpu_s: float
    """CPU time limit."""


class VocabularyLoaded(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary is loaded, so grammars can be checked."""


class VocabularyRefused(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer does not support grammars; `message` has the reason. Also the response to every check."""

    message: str


class GrammarFine(msgspec.Struct, frozen=True, tag=True):
    """The grammar is valid: an engine can enforce it."""

    spent_s: float
    """CPU time."""


class GrammarRefused(msgspec.Struct, frozen=True, tag=True):
    """The grammar cannot be used; `message` has the reason."""

    message: str
    spent_s: float = 0.0
    is_at_limit: bool = msgspec.field(default=False, name="took_all")
    """Whether the check was stopped at its CPU time limit."""


ToChecker = LoadVocabulary | CheckGrammar
FromChecker = VocabularyLoaded | VocabularyRefused | GrammarFine | GrammarRefused

read_to_checker: Callable[[bytes], ToChecker] = msgspec.json.Decoder(ToChecker).decode
read_from_checker: Callable[[bytes], FromChecker] = msgspec.json.Decoder(FromChecker).decode
