"""The process that checks grammars: `python -m quire.text.grammars.process`, a helper (`sandboxed`).

A grammar is a client's, and compiling one is work that cannot be foretold. Here it is done once before a worker sees
it, each in a fork of its own: what takes too long or too much, or breaks the library, ends there, and the next one
finds the vocabulary as it was. Reading that holds the interpreter's lock for most of a second, which a server's event
loop could not spare either.
"""

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from quire.checkpoints.grammar_vocabulary import first_mask, follow, grammar_vocabulary, matcher_of
from quire.errors import CheckpointError
from quire.text.sandboxed.grammar_messages import (
    CheckGrammar,
    FromChecker,
    GrammarFine,
    GrammarRefused,
    LoadVocabulary,
    ToChecker,
    VocabularyLoaded,
    VocabularyRefused,
    read_to_checker,
)
from quire.text.sandboxed.helper import encode_frame, lower_priority, serve

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 2 << 30
"""Address space. A vocabulary of 130,000 tokens takes 150 MB, compiling the largest grammar that is let in a few."""
FOLLOW_SHARE = 0.4
"""Of the time of a check, for following the grammar once it is compiled. Ordinary ones take a few milliseconds."""


class Checker:
    """Answers messages, one after the other."""

    def __init__(self) -> None:
        self._vocabulary: LLTokenizer | VocabularyRefused = VocabularyRefused("no vocabulary is loaded")

    def answer(self, message: ToChecker) -> FromChecker:
        """Of a vocabulary that grammars cannot use, each check returns why."""
        if isinstance(message, LoadVocabulary):
            return self._loaded(message)
        if isinstance(self._vocabulary, VocabularyRefused):
            return self._vocabulary
        return self._checked(message, self._vocabulary)

    def _loaded(self, message: LoadVocabulary) -> FromChecker:
        try:
            self._vocabulary = grammar_vocabulary(message.tokenizer_json, message.vocabulary_size, message.end_tokens)
        except CheckpointError as error:
            self._vocabulary = VocabularyRefused(str(error))
            return self._vocabulary
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


def answer_check(checker: Checker, frame: bytes) -> bytes:
    """The same in bytes."""
    return encode_frame(checker.answer(read_to_checker(frame)))


if __name__ == "__main__":
    lower_priority()
    serve(partial(answer_check, Checker()), MEMORY_BYTES)
