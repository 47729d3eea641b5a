"""What a server and the process that checks clients' grammars send to each other.

server    LoadVocabulary · CheckGrammar
process   VocabularyLoaded · VocabularyRefused · GrammarFine · GrammarRefused
"""

from collections.abc import Callable

import msgspec


class LoadVocabulary(msgspec.Struct, frozen=True, tag=True):
    """Read the tokens of a model."""

    tokenizer_json: str
    vocabulary_size: int
    end_tokens: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile this, see what may come first, and follow it for a while."""

    grammar: str
    cpu_s: float
    """Processor time it may take."""


class VocabularyLoaded(msgspec.Struct, frozen=True, tag=True):
    """Grammars can be checked."""


class VocabularyRefused(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer cannot be used for grammars, and why. Each check gets this, too."""

    message: str


class GrammarFine(msgspec.Struct, frozen=True, tag=True):
    """An engine can follow it."""

    spent_s: float
    """Of processor time."""


class GrammarRefused(msgspec.Struct, frozen=True, tag=True):
    """No engine can, and why."""

    message: str
    spent_s: float = 0.0
    took_all: bool = False
    """It was stopped when its time was over."""


ToChecker = LoadVocabulary | CheckGrammar
FromChecker = VocabularyLoaded | VocabularyRefused | GrammarFine | GrammarRefused

read_to_checker: Callable[[bytes], ToChecker] = msgspec.json.Decoder(ToChecker).decode
read_from_checker: Callable[[bytes], FromChecker] = msgspec.json.Decoder(FromChecker).decode
