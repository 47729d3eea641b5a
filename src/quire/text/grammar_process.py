"""The process that checks grammars: `python -m quire.text.grammar_process`, spoken to on its stdin.

A grammar is a client's, and compiling one is work that nobody can foretell. Here it is done once before a worker sees
it: what takes too long or too much, or breaks the library, ends in this process. Reading a vocabulary holds the
interpreter's lock for most of a second, which a server's event loop could not spare either.
"""

import socket
from typing import TYPE_CHECKING

from quire.checkpoints.grammar_vocabulary import first_mask, grammar_vocabulary, matcher_of
from quire.errors import CheckpointError
from quire.text import grammar_wire as wire
from quire.text.grammar_wire import (
    CheckerStarted,
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    ToChecker,
    VocabularyLoaded,
)
from quire.text.helper_process import allow_time, bound_memory, receive, send

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 2 << 30
"""Address space. A vocabulary of 130,000 tokens takes 150 MB, compiling the largest grammar that is let in a few."""
CPU_S = 4
"""Processor time for one message. The parent ends this process sooner."""


class Checker:
    """Answers messages, one after the other."""

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer | None = None

    def answer(self, message: ToChecker) -> FromChecker:
        """What the server is told."""
        if isinstance(message, LoadVocabulary):
            return self._loaded(message)
        if self._vocabulary is None:
            return GrammarRefused("no vocabulary is loaded")
        return self._checked(message, self._vocabulary)

    def _loaded(self, message: LoadVocabulary) -> FromChecker:
        try:
            self._vocabulary = grammar_vocabulary(message.tokenizer_json, message.vocabulary_size, message.end_tokens)
        except CheckpointError as error:
            return GrammarRefused(str(error))
        return VocabularyLoaded()

    @staticmethod
    def _checked(message: CheckGrammar, vocabulary: "LLTokenizer") -> FromChecker:
        error = first_mask(matcher_of(vocabulary, message.grammar))
        return GrammarFine() if error is None else GrammarRefused(error)


def serve_checks(end: socket.socket) -> None:
    """Answer until the other side has ended."""
    checker = Checker()
    send(end, wire.encode_frame(CheckerStarted()))
    while True:
        try:
            message = wire.read_to_checker(receive(end))
        except EOFError:
            return
        allow_time(CPU_S)
        send(end, wire.encode_frame(checker.answer(message)))


if __name__ == "__main__":
    bound_memory(MEMORY_BYTES)
    serve_checks(socket.socket(fileno=0))
