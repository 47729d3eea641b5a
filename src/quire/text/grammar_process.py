"""The process that checks grammars: `python -m quire.text.grammar_process`, spoken to on its stdin.

A grammar is a client's, and compiling one is work that nobody can foretell. Here it is done once before a worker sees
it, each in a fork of its own: what takes too long or too much, or breaks the library, ends there, and the next one
finds the vocabulary as it was. Reading that holds the interpreter's lock for most of a second, which a server's event
loop could not spare either.
"""

import os
import signal
import socket
from typing import TYPE_CHECKING, NoReturn

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
CHECK_CPU_S = 0.1
"""Processor time for one grammar: ordinary ones take a few milliseconds."""


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
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _check_and_end(message.grammar, vocabulary, writing)
        os.close(writing)
        with open(reading, "rb") as told:
            error = told.read().decode()
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            was_long = os.WTERMSIG(status) == signal.SIGPROF
            took = f"it may take {CHECK_CPU_S:g} s of processor time to be checked, and takes more"
            return GrammarRefused(f"{took}; say it with fewer rules" if was_long else "it broke what was to check it")
        return GrammarRefused(error) if error else GrammarFine()


def _check_and_end(grammar: str, vocabulary: "LLTokenizer", writing: int) -> NoReturn:
    """In the fork: say what is wrong, if anything is. The system ends it when its time is over."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
        error = first_mask(matcher_of(vocabulary, grammar))
        os.write(writing, b"" if error is None else (error or "it cannot be used").encode())
    except BaseException as error:
        os.write(writing, f"it cannot be checked: {error!r}"[:300].encode())
    finally:
        os._exit(0)


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
