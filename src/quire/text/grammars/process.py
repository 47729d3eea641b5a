"""The process that checks grammars: `python -m quire.text.grammars.process`, spoken to on its stdin.

A grammar is a client's, and compiling one is work that cannot be foretold. Here it is done once before a worker sees
it, each in a fork of its own: what takes too long or too much, or breaks the library, ends there, and the next one
finds the vocabulary as it was. Reading that holds the interpreter's lock for most of a second, which a server's event
loop could not spare either.
"""

import os
import signal
import socket
from typing import TYPE_CHECKING, NoReturn

from quire.checkpoints.grammar_vocabulary import first_mask, follow, grammar_vocabulary, matcher_of
from quire.errors import CheckpointError
from quire.text.grammars import wire
from quire.text.grammars.wire import (
    CheckerStarted,
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    ToChecker,
    VocabularyLoaded,
)
from quire.text.helper_process import allow_time, bound_memory, lower_priority, receive, send

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 2 << 30
"""Address space. A vocabulary of 130,000 tokens takes 150 MB, compiling the largest grammar that is let in a few."""
CPU_S = 4
"""Processor time for one message. The parent ends this process sooner."""
FOLLOW_SHARE = 0.4
"""Of the time of a check, for following the grammar once it is compiled. Ordinary ones take a few milliseconds."""


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
            _check_and_end(message, vocabulary, writing)
        os.close(writing)
        with open(reading, "rb") as answer:
            error = answer.read().decode()
        _, status, usage = os.wait4(child, 0)
        spent_s = usage.ru_utime + usage.ru_stime
        if os.WIFSIGNALED(status):
            took_all = os.WTERMSIG(status) == signal.SIGPROF
            took = f"expected a check within {message.cpu_s:.2g} s of processor time, it took more"
            words = f"{took}; use fewer rules" if took_all else "the grammar checker crashed on it"
            return GrammarRefused(words, spent_s, took_all)
        return GrammarRefused(error, spent_s) if error else GrammarFine(spent_s)


def _check_and_end(message: CheckGrammar, vocabulary: "LLTokenizer", writing: int) -> NoReturn:
    """In the fork: say what is wrong, if anything is. The system ends it when its time is over."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, message.cpu_s)
        matcher = matcher_of(vocabulary, message.grammar)
        first_mask(matcher)
        follow(matcher, vocabulary, message.cpu_s * FOLLOW_SHARE)
    except ValueError as error:
        os.write(writing, (str(error) or "it cannot be used").encode())
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
    lower_priority()
    serve_checks(socket.socket(fileno=0))
