"""What a server and the process that checks clients' grammars say to each other: JSON, in frames (`helper_process`).

server    LoadVocabulary · CheckGrammar
process   CheckerStarted (it has started) · VocabularyLoaded · GrammarFine · GrammarRefused
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


class CheckerStarted(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class VocabularyLoaded(msgspec.Struct, frozen=True, tag=True):
    """Grammars can be checked."""


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
FromChecker = CheckerStarted | VocabularyLoaded | GrammarFine | GrammarRefused

encode_frame = msgspec.json.Encoder().encode
read_to_checker: Callable[[bytes], ToChecker] = msgspec.json.Decoder(ToChecker).decode
read_from_checker: Callable[[bytes], FromChecker] = msgspec.json.Decoder(FromChecker).decode
